"""Dropout, residual and norm in one pass:

    z = residual + dropout(x + x_bias)         the sum; a pre-norm block goes on with it
    y = weight * xhat + bias                   xhat = (z - mean) * rstd, or z * rstd for RMSNorm

    g         = dy * weight
    dresidual = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum      RMSNorm: no mean(g)
    dx        = dropout(dresidual),  dx_bias = sum over rows of dx
    dweight   = sum over rows of dy * xhat,  dbias = sum over rows of dy

Saves xhat in the dtype of x and rstd in fp32 (4 bytes a row). Not z, not y: a weight of zero or a
large bias is harmless, unlike where xhat is recovered from y.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import native
from .autograd import register_autograd
from .checks import check_alike, check_floating, check_rows, check_vector
from .linear import column_sum
from .random import SCHEMA, Dropout, apply_dropout, op_arguments

KINDS = ("layer", "rms")

torch.library.define(
    "taut::norm_fwd",
    "(Tensor x, Tensor? residual, Tensor? x_bias, Tensor? weight, Tensor? bias, float eps, "
    f"bool is_rms, bool with_sum, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "taut::norm_bwd",
    "(Tensor dy, Tensor? dsum, Tensor xhat, Tensor rstd, Tensor? weight, bool is_rms, "
    f"bool with_residual, bool with_affine, bool with_x_bias, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def dropout_add_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    x_bias: Tensor | None = None,
    eps: float = 1e-5,
    dropout: Dropout | None = None,
    kind: str = "layer",
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The truth every kernel is held to: plain PyTorch, differentiated by autograd."""
    z = x if x_bias is None else x + x_bias.to(x.dtype)
    z = apply_dropout(z, *op_arguments("dropout_add_norm", dropout, x))
    z = z if residual is None else residual + z
    weight, bias = (t if t is None else t.to(x.dtype) for t in (weight, bias))
    if kind == "rms":
        y = torch.nn.functional.rms_norm(z, z.shape[-1:], weight, eps)
        y = y if bias is None else y + bias
    else:
        y = torch.nn.functional.layer_norm(z, z.shape[-1:], weight, bias, eps)
    return (y, z) if return_sum else y


def _composite_fwd(
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_rms: bool,
    with_sum: bool,
    *dropout: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) if x_bias is None else x.to(wide) + x_bias
    z = apply_dropout(z, *dropout)
    z = z if residual is None else residual + z
    # summed in double: what rstd is off by is in every entry of xhat and of the gradient
    mean = partial(torch.mean, dim=-1, keepdim=True, dtype=torch.float64)
    centred = z if is_rms else z - mean(z).to(wide)
    rstd = torch.rsqrt(mean(centred.square()) + eps).to(wide)
    xhat = centred * rstd
    if weight is not None and bias is not None:
        y = torch.addcmul(bias, xhat, weight)
    elif weight is not None:
        y = xhat * weight
    else:
        y = xhat.clone() if bias is None else xhat + bias
    kept_sum = z.to(x.dtype, copy=True) if with_sum else x.new_empty(0)
    return y.to(x.dtype), xhat.to(x.dtype), rstd.flatten(), kept_sum


torch.library.impl(
    "taut::norm_fwd", "default", _composite_fwd
)  # any device without a kernel of its own


def _composite_bwd(
    dy: Tensor,
    dsum: Tensor | None,
    xhat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    is_rms: bool,
    with_residual: bool,
    with_affine: bool,
    with_x_bias: bool,
    *dropout: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide_dy, wide_xhat = dy.to(rstd.dtype), xhat.to(rstd.dtype)
    g = wide_dy if weight is None else wide_dy * weight
    dz = g if is_rms else g - g.mean(-1, keepdim=True)
    dz = dz - wide_xhat * (g * wide_xhat).mean(-1, keepdim=True)
    dz = dz * rstd.view(*dy.shape[:-1], 1)
    dz = dz if dsum is None else dz + dsum
    dx = apply_dropout(dz, *dropout)
    none = rstd.new_empty(0)
    dweight, dbias = none, none.clone()
    if with_affine:
        dweight, dbias = column_sum(wide_dy * wide_xhat), column_sum(wide_dy)
    dx_bias = column_sum(dx) if with_x_bias else none.clone()
    apart = with_residual and dropout[0] > 0  # else both gradients are one tensor
    dresidual = dz.to(dy.dtype) if apart else dy.new_empty(0)
    return dx.to(dy.dtype), dresidual, dweight, dbias, dx_bias


torch.library.impl("taut::norm_bwd", "default", _composite_bwd)


@torch.library.impl("taut::norm_fwd", "cpu")
def _(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    form = native.norm_fwd if native.takes(x) else _composite_fwd
    return form(x, *arguments)


@torch.library.impl("taut::norm_bwd", "cpu")
def _(dy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    form = native.norm_bwd if native.takes(dy) else _composite_bwd
    return form(dy, *arguments)


@torch.library.impl("taut::norm_fwd", "cuda")
def _(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.dtype == torch.float64:
        return _composite_fwd(x, *arguments)
    from .triton.norm import norm_fwd  # imported on use: a CPU install has no Triton

    return norm_fwd(x, *arguments)


@torch.library.impl("taut::norm_bwd", "cuda")
def _(dy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if dy.dtype == torch.float64:
        return _composite_bwd(dy, *arguments)
    from .triton.norm import norm_bwd

    return norm_bwd(dy, *arguments)


@torch.library.register_fake("taut::norm_fwd")
def _(x, residual, x_bias, weight, bias, eps, is_rms, with_sum, *dropout):
    wide = torch.promote_types(x.dtype, torch.float32)
    kept_sum = torch.empty_like(x) if with_sum else x.new_empty(0)
    rows = x.shape[:-1].numel()
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(rows, dtype=wide), kept_sum


@torch.library.register_fake("taut::norm_bwd")
def _(dy, dsum, xhat, rstd, weight, is_rms, with_residual, with_affine, with_x_bias, *dropout):
    apart = with_residual and dropout[0] > 0
    columns = [
        rstd.new_empty(dy.shape[-1] if w else 0) for w in (with_affine, with_affine, with_x_bias)
    ]
    return torch.empty_like(dy), torch.empty_like(dy) if apart else dy.new_empty(0), *columns


def _setup_context(ctx, inputs, output):
    _, residual, x_bias, weight, bias, _, is_rms, with_sum, *scalars, sample_ids, positions = inputs
    _, xhat, rstd, _ = output
    ctx.save_for_backward(xhat, rstd, weight, sample_ids, positions)
    ctx.mark_non_differentiable(xhat, rstd)
    ctx.is_rms, ctx.scalars = is_rms, scalars
    ctx.dtypes = [t if t is None else t.dtype for t in (x_bias, weight, bias)]
    ctx.with_residual, ctx.with_sum = residual is not None, with_sum
    ctx.set_materialize_grads(False)  # an unused output costs no tensor of zeros


def _backward(ctx, dy, _dxhat, _drstd, dsum):
    xhat, rstd, weight, sample_ids, positions = ctx.saved_tensors
    need_x, need_residual, need_x_bias, need_weight, need_bias, *_ = ctx.needs_input_grad
    dy = torch.zeros_like(xhat) if dy is None else dy.contiguous()
    dx, dresidual, dweight, dbias, dx_bias = torch.ops.taut.norm_bwd(
        dy,
        dsum.contiguous() if ctx.with_sum and dsum is not None else None,
        xhat,
        rstd,
        weight,
        ctx.is_rms,
        ctx.with_residual,
        need_weight or need_bias,
        need_x_bias,
        *ctx.scalars,
        sample_ids,
        positions,
    )
    if ctx.with_residual and ctx.scalars[0] == 0.0:
        dresidual = dx
    grads = [
        dx if need_x else None,
        dresidual if need_residual else None,
        *(
            grad.to(dtype) if need else None
            for grad, dtype, need in zip(
                (dx_bias, dweight, dbias),
                ctx.dtypes,
                (need_x_bias, need_weight, need_bias),
                strict=True,
            )
        ),
    ]
    return *grads, *(None,) * 9


register_autograd("norm_fwd", _backward, _setup_context)


def dropout_add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    x_bias: Tensor | None = None,
    eps: float = 1e-5,
    dropout: Dropout | None = None,
    kind: str = "layer",
    return_sum: bool = False,
    return_xhat: bool = False,
) -> Any:
    """norm(residual + dropout(x + x_bias)) in one pass; also the sum and x-hat where asked for.

    x, residual: (..., D), alike. weight, bias, x_bias: (D,), of any floating dtype. x_bias is the
    bias of the linear that made x, left out of its GEMM. kind: "layer" or "rms". A post-norm block
    uses the norm alone, a pre-norm block carries the sum on: return_sum=True gives (norm, sum).
    return_xhat=True adds x-hat, a constant to autograd, for the `normed` of linear and mlp.
    """
    op = "dropout_add_norm"
    check_floating(op, x=x, residual=residual, weight=weight, bias=bias, x_bias=x_bias)
    check_rows(op, x=x)
    check_alike(op, x=x, residual=residual)
    check_vector(op, x.shape[-1], weight=weight, bias=bias, x_bias=x_bias)
    if kind not in KINDS:
        raise ValueError(f"{op}: kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if not eps >= 0:
        raise ValueError(f"{op}: eps must not be negative; got {eps}")
    y, xhat, _, kept_sum = torch.ops.taut.norm_fwd(
        x.contiguous(),
        residual if residual is None else residual.contiguous(),
        x_bias,
        weight,
        bias,
        eps,
        kind == "rms",
        return_sum,
        *op_arguments(op, dropout, x),
    )
    if not (return_sum or return_xhat):
        return y
    return y, *([kept_sum] if return_sum else []), *([xhat] if return_xhat else [])
