"""Every kernel, compiled without a GPU: it does not spill, and takes what figures.json says.

The kernels are those that the launchers launch for the calls below. They are compiled in a process
of its own, since this one interprets them. After a wanted change:

    python tests/ops/triton/test_compile.py --update
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import triton
from torch import Tensor

ARCHS = (80, 90, 100)
FIGURES = Path(__file__).with_name("figures.json")
VERSION = ".".join(triton.__version__.split(".")[:2])
ROWS = 8192
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


def rows(width: int, dtype: torch.dtype, count: int = ROWS) -> Tensor:
    return torch.empty(count, width, dtype=dtype, device="meta")


def coordinates(p: float) -> tuple[Any, ...]:
    if p == 0.0:
        return 0.0, 0, 0, 0, None, None
    return p, 1, 2, 3, *torch.empty(2, ROWS, dtype=torch.int64, device="meta")


def call_dropout(width: int, dtype: torch.dtype) -> None:
    from taut.ops.triton.dropout import dropout

    dropout(rows(width, dtype), coordinates(0.1))


def call_norm(width: int, dtype: torch.dtype, is_bare: bool = False) -> None:
    """With all that it can do, or as an RMSNorm of a sum, without dropout and bias."""
    from taut.ops.triton.norm import norm_bwd, norm_fwd

    x, p = rows(width, dtype), 0.0 if is_bare else 0.1
    weight, bias = x[0], None if is_bare else x[0]
    norm_fwd(x, x, bias, weight, bias, 1e-5, is_bare, is_bare, *coordinates(p))
    rstd = torch.empty(ROWS, device="meta")
    dsum, flags = (x, (True, True, False)) if is_bare else (None, (True, True, True))
    norm_bwd(x, dsum, x, rstd, weight, is_bare, *flags, *coordinates(p))


def call_embedding(width: int, dtype: torch.dtype, is_bare: bool = False) -> None:
    """As BERT has it, or tokens alone."""
    from taut.ops.triton.embedding import embedding_bwd, embedding_fwd, embedding_wgrad

    x, ids = rows(width, dtype), torch.empty(ROWS, dtype=torch.int64, device="meta")
    weight, dropout = rows(width, dtype, 30522), coordinates(0.0 if is_bare else 0.1)
    if is_bare:
        embedding_fwd(ids, weight, *(None,) * 6, 1.5, 1e-5, *dropout)
        return embedding_wgrad(weight, x, ids, 1.5, -1)
    pairs = (ids, weight) * 3
    _, xhat, rstd = embedding_fwd(*pairs, x[0], x[0], 1.5, 1e-5, *dropout)
    dz, *_ = embedding_bwd(x, xhat, rstd, x[0], True, *dropout)
    return embedding_wgrad(weight, dz, ids, 1.5, -1)


def call_gelu(tanh: bool, dtype: torch.dtype) -> None:
    from taut.ops.triton.gelu import gelu_bwd, gelu_fwd

    x = rows(3072, dtype)
    gelu_bwd(x, *gelu_fwd(x, tanh), tanh)


def call_activation(activation: str, width: int, dtype: torch.dtype, p: float) -> None:
    from taut.ops.triton.mlp import ACTIVATIONS, activation_bwd, activation_fwd

    u_width = width * (2 if ACTIVATIONS[activation][1] else 1)
    u, dropout = rows(u_width, dtype), coordinates(p)
    activation_bwd(activation_fwd(u, activation, *dropout), u, activation, *dropout)


def call_attention(width: int, dtype: torch.dtype, is_bare: bool = False) -> None:
    """Causal with dropout, or without either, on views of one projection."""
    from taut.ops.triton.attention import attention_fwd
    from taut.ops.triton.attention_bwd import attention_bwd

    q, k, v = torch.empty(ROWS, 3, 12, width, dtype=dtype, device="meta").unbind(1)
    offsets = torch.empty(33, dtype=torch.int32, device="meta")
    where = (0.0 if is_bare else 0.1, 1, 2, 3, None, None, None, 0)
    arguments = (offsets, offsets, not is_bare, 0.125, *where)
    out, lse = attention_fwd(q, k, v, *arguments)
    attention_bwd(out, q, k, v, out, lse, *arguments)


def call_softmax(width: int, dtype: torch.dtype, p: float = 0.1, has_ids: bool = False) -> None:
    """With keys by number, or with all that it can do."""
    from taut.ops.triton.softmax_attention import softmax_bwd, softmax_fwd

    x = torch.empty(48, 128, width, dtype=dtype, device="meta")
    where = coordinates(p) if has_ids else (p, 1, 2, 3, None, None)
    dropped = x if p else None
    key_positions = where[-1] if has_ids else None
    softmax_fwd(x, x, dropped, 12, 12, *where, key_positions, 0)
    softmax_bwd(x, x if has_ids else None, x, dropped, 12, 12, *where, key_positions, 0)


def call_cross_entropy(
    classes: int, dtype: torch.dtype, smoothing: float, forward: bool = True, backward: bool = True
) -> None:
    from taut.ops.triton.cross_entropy import cross_entropy

    def vector(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(ROWS, *shape, dtype=dtype, device="meta")

    logits, up = rows(classes, dtype), vector(torch.float32) if backward else None
    loss, correct = (vector(t) if forward else None for t in (torch.float32, torch.bool))
    outputs = (logits if backward else None, loss, vector(torch.float32, 2), correct)
    criterion = (-100, 1 - smoothing, smoothing / classes, 0.0)
    cross_entropy(logits, vector(torch.int64), up, *outputs, *criterion)


def call_scale(dtype: torch.dtype) -> None:
    from taut.ops.triton.cross_entropy import scale_

    scale_(rows(768, dtype), torch.empty((), device="meta"))


CALLS: dict[str, Callable[[], None]] = {
    "cross_entropy 50257 bf16": partial(call_cross_entropy, 50257, torch.bfloat16, 0.1),
    "cross_entropy 32768 bf16": partial(call_cross_entropy, 32768, torch.bfloat16, 0.0),
    "cross_entropy 32768 fp32": partial(call_cross_entropy, 32768, torch.float32, 0.1),
    "cross_entropy 50257 bf16 forward": partial(
        call_cross_entropy, 50257, torch.bfloat16, 0.0, backward=False
    ),
    "cross_entropy 50257 bf16 backward": partial(
        call_cross_entropy, 50257, torch.bfloat16, 0.0, forward=False
    ),
    "cross_entropy scale bf16": partial(call_scale, torch.bfloat16),
    "dropout 768 bf16": partial(call_dropout, 768, torch.bfloat16),
    "dropout 1024 fp32": partial(call_dropout, 1024, torch.float32),
    "norm 64 bf16": partial(call_norm, 64, torch.bfloat16),
    "norm 768 bf16": partial(call_norm, 768, torch.bfloat16),
    "norm 1024 bf16 bare": partial(call_norm, 1024, torch.bfloat16, is_bare=True),
    "norm 1024 fp32": partial(call_norm, 1024, torch.float32),
    "norm 4096 bf16": partial(call_norm, 4096, torch.bfloat16),
    "norm 8192 fp32": partial(call_norm, 8192, torch.float32),
    "norm 16384 bf16": partial(call_norm, 16384, torch.bfloat16),
    "embedding 768 bf16": partial(call_embedding, 768, torch.bfloat16),
    "embedding 768 fp32": partial(call_embedding, 768, torch.float32),
    "embedding 1024 bf16 bare": partial(call_embedding, 1024, torch.bfloat16, is_bare=True),
    "embedding 4096 bf16": partial(call_embedding, 4096, torch.bfloat16),
    "embedding 8192 fp32": partial(call_embedding, 8192, torch.float32),
    "gelu erf bf16": partial(call_gelu, False, torch.bfloat16),
    "gelu tanh bf16": partial(call_gelu, True, torch.bfloat16),
    "gelu erf fp32": partial(call_gelu, False, torch.float32),
    "gelu 768 bf16 bare": partial(call_activation, "gelu", 768, torch.bfloat16, 0.0),
    "gelu 3072 bf16": partial(call_activation, "gelu", 3072, torch.bfloat16, 0.1),
    "gelu 3072 fp32": partial(call_activation, "gelu", 3072, torch.float32, 0.1),
    "gelu_tanh 4096 bf16": partial(call_activation, "gelu_tanh", 4096, torch.bfloat16, 0.1),
    "relu 3072 bf16": partial(call_activation, "relu", 3072, torch.bfloat16, 0.1),
    "silu 3072 bf16": partial(call_activation, "silu", 3072, torch.bfloat16, 0.1),
    "swiglu 2048 bf16": partial(call_activation, "swiglu", 2048, torch.bfloat16, 0.1),
    "geglu 2048 bf16": partial(call_activation, "geglu", 2048, torch.bfloat16, 0.1),
    "attention 64 bf16": partial(call_attention, 64, torch.bfloat16),
    "attention 64 bf16 bare": partial(call_attention, 64, torch.bfloat16, is_bare=True),
    "attention 64 fp32": partial(call_attention, 64, torch.float32),
    "attention 80 bf16": partial(call_attention, 80, torch.bfloat16),
    "attention 128 bf16": partial(call_attention, 128, torch.bfloat16),
    "attention 128 bf16 bare": partial(call_attention, 128, torch.bfloat16, is_bare=True),
    "attention 128 fp32": partial(call_attention, 128, torch.float32),
    "attention 256 bf16": partial(call_attention, 256, torch.bfloat16),
    "attention 256 fp32": partial(call_attention, 256, torch.float32),
    "softmax 64 fp32": partial(call_softmax, 64, torch.float32),
    "softmax 512 bf16": partial(call_softmax, 512, torch.bfloat16),
    "softmax 512 bf16 bare": partial(call_softmax, 512, torch.bfloat16, 0.0),
    "softmax 1000 bf16 full": partial(call_softmax, 1000, torch.bfloat16, has_ids=True),
    "softmax 1024 fp32": partial(call_softmax, 1024, torch.float32),
    "softmax 4096 bf16": partial(call_softmax, 4096, torch.bfloat16),
    "softmax 4096 fp32 full": partial(call_softmax, 4096, torch.float32, has_ids=True),
}


class Launch(NamedTuple):
    """What Triton makes of the arguments of a launch when it compiles."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, Any]


def record(name: str) -> list[Launch]:
    """The launches of a call, which none of them runs."""
    launches = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        launch = Launch(f"{name}: {kernel.__name__.strip('_')}", kernel, {}, {}, {}, {})
        for i, parameter in enumerate(kernel.params):
            value = values.pop(parameter.name)
            is_special = not parameter.do_not_specialize
            kind = "constexpr"
            if isinstance(value, Tensor):
                kind = POINTERS[value.dtype]
            elif parameter.annotation_type:
                kind = parameter.annotation_type
            elif isinstance(value, float) and not parameter.is_constexpr:
                kind = "fp32"
            elif (
                value is not None and not parameter.is_constexpr and (value != 1 or not is_special)
            ):
                kind = "i32"
            launch.signature[parameter.name] = kind
            if kind == "constexpr":
                launch.constants[parameter.name] = value
            elif kind[0] == "*" or (kind == "i32" and value % 16 == 0 and is_special):
                launch.attributes[(i,)] = [["tt.divisibility", 16]]
        launch.options.update(values)
        launches.append(launch)

    with patch.object(triton.runtime.JITFunction, "run", run):
        CALLS[name]()
    return launches


def compile_call(name: str, arch: int) -> Iterator[tuple[str, dict[str, int]]]:
    with patch("taut.ops.triton.attention.gpu_class", lambda _: arch):  # whose blocks it takes
        launches = record(name)
    for launch in launches:
        source = triton.compiler.ASTSource(
            launch.kernel, launch.signature, launch.constants, launch.attributes
        )
        target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
        compiled = triton.compile(source, target=target, options=launch.options)
        yield launch.name, figures(compiled)


def figures(compiled: Any) -> dict[str, int]:
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [cuobjdump, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")
    )
    ptx = compiled.asm["ptx"]
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[a-z]+(\d+)\s", ptx)
    return {
        "registers": registers,
        "shared_bytes": compiled.metadata.shared,
        "load_bits": max(int(count or 1) * int(bits) for count, bits in loads),
        "local_bytes": stack + local,
        "contractible": len(re.findall(r"\b(?:mul|add|sub)\.(?:ftz\.)?f32", ptx)),
    }


def compile_all(out: Path) -> None:
    """In a process that does not interpret: {arch: {kernel: figures}} to a file."""
    jobs = [(name, arch) for arch in ARCHS for name in CALLS]
    found: dict[str, dict[str, dict[str, int]]] = {str(arch): {} for arch in ARCHS}
    with ProcessPoolExecutor(2) as pool:
        for (_, arch), kernels in zip(jobs, pool.map(_job, jobs), strict=True):
            found[str(arch)].update(kernels)
    out.write_text(json.dumps(found))


def _job(job: tuple[str, int]) -> dict[str, dict[str, int]]:
    return dict(compile_call(*job))


def compile_elsewhere() -> dict[str, dict[str, dict[str, int]]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        command = [sys.executable, __file__, "--compile", str(out)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stderr[-4000:])
        return json.loads(out.read_text())


def recorded() -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """{version of Triton: {arch: {kernel: figures}}}"""
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {}


def update() -> None:
    """One line a kernel, so that a change reads well in a diff."""
    found = compile_elsewhere()
    kept = {arch: {k: pick(f) for k, f in kernels.items()} for arch, kernels in found.items()}
    text = json.dumps(recorded() | {VERSION: kept}, indent=1, sort_keys=True)
    FIGURES.write_text(re.sub(r"\{\s*(\"load_bits[^}]*?)\s*\}", _one_line, text) + "\n")


def _one_line(match: re.Match[str]) -> str:
    return "{" + re.sub(r"\s+", " ", match[1]) + "}"


def pick(found: dict[str, int]) -> dict[str, int]:
    return {key: found[key] for key in ("registers", "shared_bytes", "load_bits")}


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, dict[str, int]]]:
    return compile_elsewhere()


KNOWN = "" if VERSION in recorded() else f"-spills only: no figures of Triton {VERSION}"
every_call = pytest.mark.parametrize(
    ("arch", "name"),
    [
        pytest.param(arch, name, id=f"sm_{arch}-{name}{KNOWN}")
        for arch in map(str, ARCHS)
        for name in CALLS
    ],
)


@every_call
def test_kernels_take_what_was_recorded(compiled, arch, name):
    kernels = {k: found for k, found in compiled[arch].items() if k.startswith(f"{name}: ")}
    assert kernels
    for kernel, found in kernels.items():
        assert found["local_bytes"] == 0, f"{kernel} spills on sm_{arch}"
        if not KNOWN:
            was = recorded()[VERSION][arch].get(kernel)
            assert pick(found) == was, (
                f"{kernel} on sm_{arch} takes {pick(found)}, recorded is {was}; if that is wanted: "
                f"python {Path(__file__).name} --update, in {FIGURES.parent}"
            )


def test_activations_have_the_same_bits_in_every_kernel(compiled):
    """No product and sum that the compiler may contract in one kernel and not in another."""
    for arch, kernels in compiled.items():
        for kernel, found in kernels.items():
            if kernel.startswith(("gelu", "relu", "silu", "swiglu", "geglu")):
                assert found["contractible"] == 0, f"{kernel} on sm_{arch}"
            elif kernel.startswith("norm"):  # the count sees what may be contracted
                assert found["contractible"] > 0, f"{kernel} on sm_{arch}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_all(Path(sys.argv[2]))
    elif sys.argv[1:] == ["--update"]:
        update()
    else:
        sys.exit(f"{Path(__file__).name}: --update records the figures of Triton {VERSION}")
