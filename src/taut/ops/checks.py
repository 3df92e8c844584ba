"""What every public op refuses, in one sentence each."""

from itertools import pairwise

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """Dense floating tensors of a dtype with kernels, all on one device."""
    device = None
    for name, t in tensors.items():
        if t is None:
            continue
        if t.dtype not in FLOATS or t.layout != torch.strided:
            raise ValueError(
                f"{op}: {name} must be a dense float32, bfloat16, float16 or float64 tensor; "
                f"got {t.dtype}, layout {t.layout}"
            )
        device = device or t.device
        if t.device != device:
            raise ValueError(f"{op}: all tensors must be on {device}; {name} is on {t.device}")


def check_rows(op: str, **tensors: Tensor) -> None:
    """Tensors of rows need a last dimension of at least one column."""
    for name, t in tensors.items():
        if t.dim() == 0 or t.shape[-1] == 0:
            raise ValueError(f"{op}: {name} must be shaped (..., D), D >= 1; got {tuple(t.shape)}")


def check_alike(op: str, **tensors: Tensor | None) -> None:
    """One shape and one dtype for all."""
    given = {name: t for name, t in tensors.items() if t is not None}
    first = next(iter(given.values()))
    if any(t.shape != first.shape or t.dtype != first.dtype for t in given.values()):
        shown = ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in given.items())
        raise ValueError(f"{op}: these must be alike in shape and dtype: {shown}")


def check_vector(op: str, size: int, **tensors: Tensor | None) -> None:
    """Weights and biases: one number a column."""
    for name, t in tensors.items():
        if t is not None and t.shape != (size,):
            raise ValueError(f"{op}: {name} must be shaped ({size},); got {tuple(t.shape)}")


def check_linear(op: str, width: int, dtype: torch.dtype, **parameters: Tensor | None) -> None:
    """A weight (F, width) and its bias (F,), in this order, of the dtype of the rows they meet."""
    (weight_name, weight), (bias_name, bias) = parameters.items()
    assert weight is not None
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"{op}: {weight_name} must be shaped (F, {width}); got {tuple(weight.shape)}"
        )
    check_vector(op, weight.shape[0], **{bias_name: bias})
    for name, t in parameters.items():
        if t is not None and t.dtype != dtype:
            raise ValueError(f"{op}: {name} must have the dtype of x, {dtype}; got {t.dtype}")


def check_offsets(op: str, cu_seqlens: Tensor, tokens: int) -> list[int]:
    """cu_seqlens as what reads it may trust it. It looks at values: not for a GPU's hot path."""
    offsets = cu_seqlens.tolist()
    smallest = min(end - start for start, end in pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] != tokens or smallest < 0:
        raise ValueError(
            f"{op}: cu_seqlens must start at 0, not decrease and end at {tokens} tokens; got "
            f"{offsets[0]} to {offsets[-1]} with a smallest step of {smallest}"
        )
    return offsets
