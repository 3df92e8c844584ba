"""Which form of each op runs on which device, and why: what `taut info` prints."""

from importlib.util import find_spec
from typing import NamedTuple

import torch

from . import native
from .linear import probe

KERNEL_OPS = (
    "attention",
    "cross_entropy",
    "dropout",
    "dropout_add_norm",
    "embedding",
    "gelu",
    "linear_cross_entropy",
    "mlp",
    "softmax_attention",
)


class Form(NamedTuple):
    """One line of the answer."""

    op: str
    device: str
    form: str
    why: str


def _kernels(device: str) -> tuple[str, str]:
    if device == "cpu" and native.library is None:
        return "composite", native.build
    if device == "cuda" and not torch.cuda.is_available():
        return "none", "torch sees no CUDA device"
    if device == "cuda" and find_spec("triton") is None:
        return "none", "Triton is not installed: pip install 'taut[gpu]'"
    form = f"C++ ({native.build})" if device == "cpu" else "Triton"
    return form, "float32, bfloat16, float16; float64 runs on the composite"


def _gemm(device: str) -> tuple[str, str]:
    if device == "cpu":
        return "oneDNN" if probe().use_onednn else "F.linear", probe().reason
    if not torch.cuda.is_available():
        return "none", "torch sees no CUDA device"
    return "F.linear", "cuBLAS by way of PyTorch"


def _optimizer(device: str) -> tuple[str, str]:
    form, why = _kernels(device)
    return (form, why) if device == "cpu" else ("composite", "it has no Triton kernel yet")


def forms() -> list[Form]:
    """Every op on every device."""
    found = {**dict.fromkeys(KERNEL_OPS, _kernels), "linear": _gemm, "optimizer": _optimizer}
    return [Form(op, device, *of(device)) for op, of in found.items() for device in ("cpu", "cuda")]
