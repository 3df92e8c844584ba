"""The libraries of csrc/: what their functions take, where they lie, which one this CPU can run.

They are plain C functions on pointers and sizes (no libtorch), built at install, once per
instruction set, and loaded after torch, so that both share one OpenMP runtime.
"""

import ctypes
import re
import sys
from ctypes import (
    POINTER,
    Structure,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from pathlib import Path

# what taut_cpu_level returns -> libtaut_<build>.so
_BUILDS = {5: "amx", 4: "v4", 3: "v3", 0: "generic"}


class Dropout(Structure):  # csrc/random.h
    _fields_ = (
        ("threshold", c_uint32),
        ("key0", c_uint32),
        ("key1", c_uint32),
        ("scale", c_float),
        ("sample_ids", c_void_p),
        ("positions", c_void_p),
    )


class NormFwd(Structure):  # csrc/norm.cpp
    _fields_ = (
        ("rows", c_int64),
        ("width", c_int64),
        *((name, c_void_p) for name in ("x", "residual", "x_bias", "weight", "bias")),
        *((name, c_void_p) for name in ("y", "xhat", "rstd", "sum")),
        ("eps", c_float),
        ("is_rms", c_int32),
    )


class NormBwd(Structure):  # csrc/norm.cpp
    _fields_ = (
        ("rows", c_int64),
        ("width", c_int64),
        *((name, c_void_p) for name in ("dy", "dsum", "xhat", "rstd", "weight")),
        *((name, c_void_p) for name in ("dx", "dresidual", "dweight", "dbias", "dx_bias")),
        ("is_rms", c_int32),
    )


class Activation(Structure):  # csrc/mlp.cpp
    _fields_ = (
        ("rows", c_int64),
        ("width", c_int64),
        *((name, c_void_p) for name in ("u", "da", "a", "du", "du_sum")),
        ("code", c_int32),
        ("gated", c_int32),
    )


class Embedding(Structure):  # csrc/embedding.cpp
    _fields_ = (
        *((name, c_int64) for name in ("rows", "width")),
        *((name, c_void_p) for name in ("ids", "positions", "types")),
        *((name, c_void_p) for name in ("weight", "position_weight", "type_weight", "sinusoids")),
        *((name, c_void_p) for name in ("norm_weight", "norm_bias", "dy", "y", "xhat", "rstd")),
        *((name, c_void_p) for name in ("dz", "dnorm_weight", "dnorm_bias")),
        *((name, c_float) for name in ("scale", "eps")),
    )


class TableGrad(Structure):  # csrc/embedding.cpp
    _fields_ = (
        *((name, c_int64) for name in ("rows", "width", "size")),
        *((name, c_void_p) for name in ("ids", "dz", "out")),
        ("padding", c_int64),
        ("scale", c_float),
        ("is_added", c_int32),
    )


class Heads(Structure):  # csrc/attention.h
    _fields_ = (("data", c_void_p), ("token", c_int64), ("head", c_int64))


class Attention(Structure):  # csrc/attention.h
    _fields_ = (
        *((name, c_int64) for name in ("sequences", "heads", "kv_heads", "width")),
        *((name, c_void_p) for name in ("cu_q", "cu_k")),
        *((name, Heads) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        ("lse", c_void_p),
        ("scale", c_float),
        ("causal", c_int32),
        ("key_positions", c_void_p),
        ("first_head", c_uint32),
    )


class Softmax(Structure):  # csrc/softmax_attention.cpp
    _fields_ = (
        *((name, c_int64) for name in ("first", "matrices", "heads", "queries", "keys")),
        *((name, c_void_p) for name in ("scores", "p", "dropped", "dp", "ds", "key_positions")),
        ("first_head", c_uint32),
    )


class CrossEntropy(Structure):  # csrc/cross_entropy.cpp
    _fields_ = (
        *((name, c_int64) for name in ("rows", "classes", "ignore_index")),
        *((name, c_void_p) for name in ("logits", "targets", "drows", "grad")),
        *((name, c_void_p) for name in ("loss", "stats", "correct")),
        *((name, c_double) for name in ("on_target", "on_all", "z_loss")),
    )


class Step(Structure):  # csrc/optimizer.cpp
    _fields_ = (
        ("tensors", c_int64),
        *((name, c_void_p) for name in ("sizes", "weights", "lows", "grads", "first", "second")),
        ("decays", c_void_p),
        *((name, c_double) for name in ("lr", "beta1", "beta2", "eps")),
        *((name, c_double) for name in ("correction1", "correction2", "grad_scale")),
        *((name, c_int32) for name in ("kind", "is_nesterov", "is_first")),
    )


_SIGNATURES = {
    "taut_cross_entropy": (c_int32, POINTER(CrossEntropy)),
    "taut_accumulate": (c_int64, c_void_p, c_void_p, c_void_p, c_int32, c_int32),
    "taut_ask_for_huge_pages": (c_void_p, c_int64),
    "taut_attention_fwd": (c_int32, POINTER(Attention), POINTER(Dropout)),
    "taut_attention_bwd": (c_int32, POINTER(Attention), POINTER(Dropout)),
    "taut_dropout": (c_int32, c_int64, c_int64, c_void_p, c_void_p, POINTER(Dropout)),
    "taut_embedding_fwd": (c_int32, POINTER(Embedding), POINTER(Dropout)),
    "taut_embedding_bwd": (c_int32, POINTER(Embedding), POINTER(Dropout)),
    "taut_table_grad": (c_int32, c_int32, POINTER(TableGrad)),
    "taut_norm_fwd": (c_int32, POINTER(NormFwd), POINTER(Dropout)),
    "taut_norm_bwd": (c_int32, POINTER(NormBwd), POINTER(Dropout)),
    "taut_activation_fwd": (c_int32, POINTER(Activation), POINTER(Dropout)),
    "taut_activation_bwd": (c_int32, POINTER(Activation), POINTER(Dropout)),
    "taut_gelu_fwd": (c_int32, c_int64, c_void_p, c_int32, c_void_p, c_void_p),
    "taut_gelu_bwd": (c_int32, c_int64, c_void_p, c_void_p, c_void_p, c_int32, c_void_p),
    "taut_products": (*(c_int64,) * 4, *(c_void_p, *(c_int64,) * 3) * 2, c_void_p, c_float),
    "taut_softmax_fwd": (c_int32, POINTER(Softmax), POINTER(Dropout)),
    "taut_softmax_bwd": (c_int32, POINTER(Softmax), POINTER(Dropout)),
    "taut_num_threads": (),
    "taut_optimizer_step": (c_int32, c_int32, POINTER(Step)),
    "taut_sum_of_squares": (c_int32, c_int64, c_void_p, c_void_p, c_void_p),
    "taut_column_sum": (c_int32, c_int64, c_int64, c_void_p, c_void_p),
}


def openmp_runtimes() -> list[str]:
    """The OpenMP runtimes of this process: one, or threads would fight for the cores."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    return sorted(set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)\b\S*)$", maps.read_text(), re.M)))


def _share_openmp() -> None:
    """Show the runtime that torch brought to our libraries, which name none of their own."""
    ctypes.CDLL((openmp_runtimes() or ["libgomp.so.1"])[0], mode=ctypes.RTLD_GLOBAL)


def load_build(folder: Path, build: str) -> ctypes.CDLL:
    """One of the built libraries, its functions typed."""
    loaded = ctypes.CDLL(str(folder / f"libtaut_{build}.so"))
    for name, types in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = types
        function.restype = c_int32 if name == "taut_num_threads" else None
    return loaded


def library_folders() -> list[Path]:
    """Where an install may have put libraries; an editable one has two folders."""
    folders = (Path(folder, "lib") for folder in sys.modules["taut"].__path__)
    return [folder for folder in folders if folder.is_dir()]


def runnable_builds(folder: Path) -> list[str]:
    """The builds in a folder that this CPU can run, the best first."""
    if not (folder / "libtaut_generic.so").exists():
        return []
    _share_openmp()
    level = ctypes.CDLL(str(folder / "libtaut_generic.so")).taut_cpu_level()
    builds = [build for needed, build in _BUILDS.items() if needed <= level]
    return [build for build in builds if (folder / f"libtaut_{build}.so").exists()]


def load() -> tuple[ctypes.CDLL | None, str]:
    for folder in library_folders():
        for best in runnable_builds(folder):
            return load_build(folder, best), best
    return None, "no library: this install was made without a C++ compiler, or runs from source"
