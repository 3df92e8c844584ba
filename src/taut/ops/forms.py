"""Which form of each op runs on which device, and why: what `taut info` prints."""

from importlib.util import find_spec
from typing import NamedTuple

import torch

from . import native
from .linear import probe

KERNEL_OPS = ("dropout", "dropout_add_norm", "gelu", "mlp")


class Form(NamedTuple):
    """One line of the answer."""

    op: str
    device: str
    form: str
    why: str


def _cpu() -> tuple[str, str]:
    if native.library is None:
        return "composite", native.build
    return f"C++ ({native.build})", "float32, bfloat16, float16; float64 runs on the composite"


def _cuda() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "none", "torch sees no CUDA device"
    if find_spec("triton") is None:
        return "none", "Triton is not installed: pip install 'taut[gpu]'"
    return "Triton", "float32, bfloat16, float16; float64 runs on the composite"


def forms() -> list[Form]:
    """Every op on every device."""
    lines = [
        Form(op, device, *found)
        for op in KERNEL_OPS
        for device, found in (("cpu", _cpu()), ("cuda", _cuda()))
    ]
    gemm = probe()
    lines.append(Form("linear", "cpu", "oneDNN" if gemm.use_onednn else "F.linear", gemm.reason))
    lines.append(
        Form(
            "linear",
            "cuda",
            "F.linear" if torch.cuda.is_available() else "none",
            _cuda()[1] if not torch.cuda.is_available() else "cuBLAS by way of PyTorch",
        )
    )
    return lines
