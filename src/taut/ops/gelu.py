"""GELU that keeps its output instead of its input:  y = x * Phi(x), erf or tanh form.

GELU falls to one minimum and rises after it, so y and one bit (which side of the minimum x was on)
determine x. The backward pass recovers x by two Halley steps and evaluates the derivative there:

    f = g(x) - y,   x <- x - 2 f g' / (2 g'^2 - f g'')

Saves y, which the next linear keeps anyway, and one bit an element. The polynomials published for
this inverse (Tempo, arXiv 2210.10246) err by up to 2.7; this one by 1e-4, beside the minimum.
Where the next layer is ours, ops/mlp.py is better still: it recomputes exactly and keeps no bit.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import native
from .autograd import register_autograd
from .checks import check_floating

torch.library.define("taut::gelu_fwd", "(Tensor x, bool tanh) -> (Tensor, Tensor)")
torch.library.define("taut::gelu_bwd", "(Tensor dy, Tensor y, Tensor side, bool tanh) -> Tensor")


class Minimum(NamedTuple):
    """Where GELU is smallest, and how it bends there."""

    x: float
    y: float
    curvature: float


MINIMA = {
    False: Minimum(-0.7517915246935645, -0.16997120747990369, 0.43149399231404695),
    True: Minimum(-0.7524614220710162, -0.17004075057125407, 0.4304000910248586),
}


def gelu_reference(x: Tensor, tanh: bool = False) -> Tensor:
    """The truth every kernel is held to: plain PyTorch, differentiated by autograd."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


def derivatives(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """GELU and its first two derivatives."""
    if not tanh:
        cdf = 0.5 * torch.special.erfc(x * -math.sqrt(0.5))
        pdf = torch.exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)
        return x * cdf, cdf + x * pdf, pdf * (2 - x * x)
    k, c = 2 * math.sqrt(2 / math.pi), 0.044715
    v = x * (k + k * c * x * x)  # few roundings: beside the minimum each one shows in the inverse
    s, rest = torch.sigmoid(v), torch.sigmoid(-v)  # s = (1 + tanh) / 2 without its cancellation
    dv, ddv = k + 3 * k * c * x * x, 6 * k * c * x
    ds = s * rest * dv
    dds = s * rest * ddv + ds * (rest - s) * dv
    return x * s, s + x * ds, 2 * ds + x * dds


def _composite_fwd(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    right = (x >= MINIMA[tanh].x).flatten().to(torch.uint8)
    bits = F.pad(right, (0, -right.numel() % 8)).view(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=x.device)
    # not F.gelu: the 1 + erf of its tail loses the digits that the inverse needs
    y = derivatives(x.to(torch.promote_types(x.dtype, torch.float32)), tanh)[0]
    return y.to(x.dtype), (bits * weights).sum(1, dtype=torch.uint8)


torch.library.impl(
    "taut::gelu_fwd", "default", _composite_fwd
)  # any device without a kernel of its own


def _composite_bwd(dy: Tensor, y: Tensor, side: Tensor, tanh: bool) -> Tensor:
    low = MINIMA[tanh]
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    shifts = torch.arange(8, dtype=torch.uint8, device=y.device)
    right = (side.view(-1, 1) >> shifts & 1).flatten()[: y.numel()].view(y.shape) == 1
    near = torch.sqrt((wide - low.y).clamp_min(0) * (2 / low.curvature))
    tail = torch.sqrt(-2 * torch.log((-wide * math.sqrt(2 * math.pi)).clamp(1e-37, 1.0)))
    x = torch.where(
        right,
        torch.where(wide > 0.5, wide, low.x + near),
        torch.where(wide > -0.1, -tail, low.x - near),
    )
    for _ in range(2 if wide.dtype == torch.float32 else 5):
        g, dg, ddg = derivatives(x, tanh)
        f = g - wide
        scale = 2 * dg * dg - f * ddg
        x = x - torch.where(scale.abs() > 1e-30, 2 * f * dg / scale, 0.0)
        x = torch.where(right, x.clamp_min(low.x), x.clamp_max(low.x))
    slope = derivatives(x, tanh)[1]
    slope = torch.where(wide > 10, 1.0, torch.where(right | (wide < 0), slope, wide))
    return (dy * slope).to(dy.dtype)


torch.library.impl("taut::gelu_bwd", "default", _composite_bwd)


@torch.library.impl("taut::gelu_fwd", "cpu")
def _(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return native.gelu_fwd(x, tanh) if native.takes(x) else _composite_fwd(x, tanh)


@torch.library.impl("taut::gelu_bwd", "cpu")
def _(dy: Tensor, y: Tensor, side: Tensor, tanh: bool) -> Tensor:
    form = native.gelu_bwd if native.takes(y) else _composite_bwd
    return form(dy, y, side, tanh)


@torch.library.impl("taut::gelu_fwd", "cuda")
def _(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return _composite_fwd(x, tanh)
    from .triton.gelu import gelu_fwd  # imported on use: a CPU install has no Triton

    return gelu_fwd(x, tanh)


@torch.library.impl("taut::gelu_bwd", "cuda")
def _(dy: Tensor, y: Tensor, side: Tensor, tanh: bool) -> Tensor:
    if y.dtype == torch.float64:
        return _composite_bwd(dy, y, side, tanh)
    from .triton.gelu import gelu_bwd

    return gelu_bwd(dy, y, side, tanh)


@torch.library.register_fake("taut::gelu_fwd")
def _(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


@torch.library.register_fake("taut::gelu_bwd")
def _(dy: Tensor, y: Tensor, side: Tensor, tanh: bool) -> Tensor:
    return torch.empty_like(dy)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*output)
    ctx.tanh = inputs[1]
    ctx.set_materialize_grads(False)  # the side has no gradient: no tensor of zeros for it


def _backward(ctx, dy, _dside):
    if dy is None:
        return None, None
    return torch.ops.taut.gelu_bwd(dy.contiguous(), *ctx.saved_tensors, ctx.tanh), None


register_autograd("gelu_fwd", _backward, _setup_context)


def gelu(x: Tensor, tanh: bool = False) -> Tensor:
    """GELU of x, any shape; the exact erf form, or with tanh=True the tanh approximation."""
    check_floating("gelu", x=x)
    return torch.ops.taut.gelu_fwd(x.contiguous(), tanh)[0]
