"""The feed-forward block:  u = x w1^T + b1,  a = dropout(act(u)),  y = a w2^T + b2.

    da = dy w2,   du = act'(u) * dropout(da),   dw2 = dy^T a,   db2 = sum dy
    dx = du w1,   dw1 = du^T x,                 db1 = sum du

    gelu, gelu_tanh, relu, silu     act(u), u: (T, F)
    swiglu, geglu                   silu(gate) * up, gelu(gate) * up, u = [gate, up]: (T, 2 F)

Saves x (x-hat where a norm made x, as linear does) and u. a is rebuilt from u in the pass that
computes du and the sum of its rows, with the arithmetic of the forward pass: gradients are
bit-equal to those of keeping a.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import native
from .autograd import register_autograd
from .checks import check_floating, check_linear, check_rows
from .linear import (
    NORMED_SCHEMA,
    Normed,
    column_sum,
    dgrad,
    forward,
    normed_arguments,
    rebuilt,
    wgrad,
)
from .random import SCHEMA, Dropout, apply_dropout, op_arguments

# name -> (code in kernels, whether u holds a gate and a value side by side)
ACTIVATIONS = {
    "gelu": (0, False),
    "gelu_tanh": (1, False),
    "relu": (2, False),
    "silu": (3, False),
    "swiglu": (3, True),
    "geglu": (0, True),
}
PLAIN = ("gelu", "gelu_tanh", "relu", "silu")  # by code, without a gate

torch.library.define("taut::activation_fwd", f"(Tensor u, str activation, {SCHEMA}) -> Tensor")
torch.library.define(
    "taut::activation_bwd",
    f"(Tensor da, Tensor u, str activation, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "taut::mlp_fwd",
    f"(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, {NORMED_SCHEMA}, "
    f"str activation, {SCHEMA}) -> (Tensor, Tensor)",
)
torch.library.define(
    "taut::mlp_bwd",
    "(Tensor dy, Tensor x, Tensor u, Tensor w1, Tensor w2, bool[] needs, "
    f"str activation, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def activate(u: Tensor, activation: str) -> Tensor:
    """The activation in plain PyTorch, differentiated by autograd."""
    code, gated = ACTIVATIONS[activation]
    gate, up = u.chunk(2, dim=-1) if gated else (u, None)
    act = (F.gelu, lambda g: F.gelu(g, approximate="tanh"), F.relu, F.silu)[code](gate)
    return act if up is None else act * up


def mlp_reference(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "gelu",
    dropout: Dropout | None = None,
) -> Tensor:
    """The truth every kernel is held to: plain PyTorch, differentiated by autograd."""
    a = activate(F.linear(x, w1, b1), activation)
    return F.linear(apply_dropout(a, *op_arguments("mlp", dropout, x)), w2, b2)


def _composite_fwd(u: Tensor, activation: str, *dropout: Any) -> Tensor:
    return apply_dropout(activate(u, activation), *dropout)


torch.library.impl(
    "taut::activation_fwd", "default", _composite_fwd
)  # any device without a kernel of its own


def _composite_bwd(
    da: Tensor, u: Tensor, activation: str, *dropout: Any
) -> tuple[Tensor, Tensor, Tensor]:
    code, gated = ACTIVATIONS[activation]
    aten = torch.ops.aten
    backward = (
        aten.gelu_backward,
        partial(aten.gelu_backward, approximate="tanh"),
        partial(aten.threshold_backward, threshold=0),
        aten.silu_backward,
    )[code]
    da, a = apply_dropout(da, *dropout), activate(u, activation)
    if gated:
        gate, up = u.chunk(2, dim=-1)
        du = torch.cat([backward(da * up, gate), da * activate(gate, PLAIN[code])], -1)
    else:
        du = backward(da, u)
    return du, apply_dropout(a, *dropout).clone(), column_sum(du)


torch.library.impl("taut::activation_bwd", "default", _composite_bwd)


@torch.library.impl("taut::activation_fwd", "cpu")
def _(u: Tensor, activation: str, *dropout: Any) -> Tensor:
    if native.takes(u):
        return native.activation_fwd(u, *ACTIVATIONS[activation], dropout)
    return _composite_fwd(u, activation, *dropout)


@torch.library.impl("taut::activation_bwd", "cpu")
def _(da: Tensor, u: Tensor, activation: str, *dropout: Any) -> tuple[Tensor, Tensor, Tensor]:
    if native.takes(u):
        return native.activation_bwd(da, u, *ACTIVATIONS[activation], dropout)
    return _composite_bwd(da, u, activation, *dropout)


@torch.library.impl("taut::activation_fwd", "cuda")
def _(u: Tensor, activation: str, *dropout: Any) -> Tensor:
    if u.dtype == torch.float64:
        return _composite_fwd(u, activation, *dropout)
    from .triton.mlp import activation_fwd  # imported on use: a CPU install has no Triton

    return activation_fwd(u, activation, *dropout)


@torch.library.impl("taut::activation_bwd", "cuda")
def _(da: Tensor, u: Tensor, activation: str, *dropout: Any) -> tuple[Tensor, Tensor, Tensor]:
    if u.dtype == torch.float64:
        return _composite_bwd(da, u, activation, *dropout)
    from .triton.mlp import activation_bwd

    return activation_bwd(da, u, activation, *dropout)


@torch.library.impl("taut::mlp_fwd", "default")  # GEMMs and a kernel that picks itself by device
def _(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    _xhat: Tensor | None,
    _norm_weight: Tensor | None,
    _norm_bias: Tensor | None,
    activation: str,
    *dropout: Any,
) -> tuple[Tensor, Tensor]:
    u = forward(x, w1, b1)
    a = torch.ops.taut.activation_fwd(u, activation, *dropout)
    return forward(a, w2, b2), u


@torch.library.impl("taut::mlp_bwd", "default")
def _(
    dy: Tensor,
    x: Tensor,
    u: Tensor,
    w1: Tensor,
    w2: Tensor,
    needs: list[bool],
    activation: str,
    *dropout: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    need_x, need_w1, need_b1, need_w2, need_b2 = needs
    da = dgrad(dy, w2)
    du, a, db1 = torch.ops.taut.activation_bwd(da, u, activation, *dropout)
    del da
    dw2 = wgrad(dy, a) if need_w2 else dy.new_empty(0)
    del a
    return (
        dgrad(du, w1) if need_x else dy.new_empty(0),
        wgrad(du, x) if need_w1 else dy.new_empty(0),
        db1 if need_b1 else db1.new_empty(0),
        dw2,
        column_sum(dy) if need_b2 else db1.new_empty(0),
    )


@torch.library.register_fake("taut::activation_fwd")
def _(u: Tensor, activation: str, *dropout: Any) -> Tensor:
    _, gated = ACTIVATIONS[activation]
    return u.new_empty(*u.shape[:-1], u.shape[-1] // (2 if gated else 1))


@torch.library.register_fake("taut::activation_bwd")
def _(da: Tensor, u: Tensor, activation: str, *dropout: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(u.dtype, torch.float32)
    return torch.empty_like(u), torch.empty_like(da), u.new_empty(u.shape[-1], dtype=wide)


@torch.library.register_fake("taut::mlp_fwd")
def _(x, w1, b1, w2, b2, *arguments):
    rows = x.shape[:-1]
    return x.new_empty(*rows, w2.shape[0]), x.new_empty(*rows, w1.shape[0])


@torch.library.register_fake("taut::mlp_bwd")
def _(dy, x, u, w1, w2, needs, activation, *dropout):
    wide = torch.promote_types(x.dtype, torch.float32)
    shapes = (x.shape, w1.shape, w1.shape[:1], w2.shape, w2.shape[:1])
    dtypes = (x.dtype, x.dtype, wide, x.dtype, wide)
    return tuple(
        x.new_empty(shape if need else (0,), dtype=dtype)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    )


def _setup_context(ctx, inputs, output):
    x, w1, _, w2, _, *normed, ctx.activation, p, seed, step, site, sample_ids, positions = inputs
    kept = x if normed[0] is None else None
    ctx.save_for_backward(kept, output[1], w1, w2, sample_ids, positions, *normed)
    ctx.mark_non_differentiable(output[1])
    ctx.scalars = p, seed, step, site
    ctx.set_materialize_grads(False)  # u has no gradient of its own: no tensor of zeros for it


def _backward(ctx, dy, _du):
    if dy is None:
        return (None,) * 15
    x, u, w1, w2, sample_ids, positions, *normed = ctx.saved_tensors
    x = rebuilt(*normed) if x is None else x
    needs = list(ctx.needs_input_grad[:5])
    grads = torch.ops.taut.mlp_bwd(
        dy.contiguous(), x, u, w1, w2, needs, ctx.activation, *ctx.scalars, sample_ids, positions
    )
    return *(g.to(x.dtype) if n else None for g, n in zip(grads, needs, strict=True)), *(None,) * 10


register_autograd("mlp_fwd", _backward, _setup_context)


def mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "gelu",
    dropout: Dropout | None = None,
    normed: Normed | None = None,
) -> Tensor:
    """linear, activation, dropout, linear; keeps the input and the pre-activation alone.

    x: (..., D), w1: (F, D), b1: (F,), w2: (D_out, F), b2: (D_out,); one dtype. For swiglu and geglu
    w1 is (2 F, D): the gate's rows first. dropout acts on the activations. Leave b2 out and give it
    to dropout_add_norm as x_bias where one follows. normed: as for linear.
    """
    check_floating("mlp", x=x, w1=w1, b1=b1, w2=w2, b2=b2)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"mlp: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}"
        )
    check_rows("mlp", x=x)
    check_linear("mlp", x.shape[-1], x.dtype, w1=w1, b1=b1)
    _, gated = ACTIVATIONS[activation]
    if gated and w1.shape[0] % 2:
        raise ValueError(f"mlp: {activation} needs an even number of rows in w1; got {w1.shape[0]}")
    check_linear("mlp", w1.shape[0] // (2 if gated else 1), x.dtype, w2=w2, b2=b2)
    return torch.ops.taut.mlp_fwd(
        x.contiguous(),
        w1.contiguous(),
        b1,
        w2.contiguous(),
        b2,
        *normed_arguments("mlp", normed, x),
        activation,
        *op_arguments("mlp", dropout, x),
    )[0]
