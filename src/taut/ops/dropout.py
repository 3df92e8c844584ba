"""Dropout by logical coordinates:  y = x * keep / P(keep), keep as in ops/random.py.

    dx = dy * keep / P(keep)

Saves nothing: the backward pass draws the same numbers again.
"""

from typing import Any

import torch
from torch import Tensor

from . import native
from .autograd import register_autograd
from .checks import check_floating, check_rows
from .random import SCHEMA, Dropout, apply_dropout, op_arguments

torch.library.define("taut::dropout", f"(Tensor x, {SCHEMA}) -> Tensor")


def dropout_reference(x: Tensor, dropout: Dropout | None = None) -> Tensor:
    """The truth every kernel is held to: plain PyTorch, differentiated by autograd."""
    return apply_dropout(x, *op_arguments("dropout", dropout, x))


def _composite(x: Tensor, *dropout: Any) -> Tensor:
    return apply_dropout(x, *dropout) if dropout[0] else x.clone()


torch.library.impl("taut::dropout", "default", _composite)  # any device without a kernel of its own


@torch.library.impl("taut::dropout", "cpu")
def _(x: Tensor, *dropout: Any) -> Tensor:
    return native.dropout(x, dropout) if native.takes(x) else _composite(x, *dropout)


@torch.library.impl("taut::dropout", "cuda")
def _(x: Tensor, *dropout: Any) -> Tensor:
    if x.dtype == torch.float64:
        return _composite(x, *dropout)
    from .triton.dropout import dropout as kernel  # imported on use: a CPU install has no Triton

    return kernel(x, dropout)


@torch.library.register_fake("taut::dropout")
def _(x: Tensor, *dropout: Any) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx, inputs, output):
    _, *ctx.scalars, sample_ids, positions = inputs
    ctx.save_for_backward(sample_ids, positions)


def _backward(ctx, dy):
    dx = torch.ops.taut.dropout(dy.contiguous(), *ctx.scalars, *ctx.saved_tensors)
    return dx, None, None, None, None, None, None


register_autograd("dropout", _backward, _setup_context)


def dropout(x: Tensor, dropout: Dropout | None = None) -> Tensor:
    """x with entries zeroed where the coordinates say so and the rest scaled up. x: (..., D)."""
    check_floating("dropout", x=x)
    check_rows("dropout", x=x)
    return torch.ops.taut.dropout(x.contiguous(), *op_arguments("dropout", dropout, x))
