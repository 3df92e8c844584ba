"""y = x weight^T + bias: the one place that chooses a GEMM.

    dx = dy weight,   dweight = dy^T x,   dbias = sum over rows of dy

Saves x; where x is a norm's output, x-hat in its place, which the norm keeps anyway.

PyTorch hands fp32 GEMMs on CPU to MKL, which takes its AVX2 path on AMD; oneDNN, which the same
wheel carries, is about twice as fast there. A probe times both once per process and takes oneDNN
where it wins clearly; `taut info` shows what it found. bf16 goes to oneDNN in any case.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import native
from .autograd import register_autograd
from .checks import check_alike, check_floating, check_linear, check_rows, check_vector

# The x-hat, weight and bias of the norm that made an input.
NORMED_SCHEMA = "Tensor? xhat, Tensor? norm_weight, Tensor? norm_bias"
Normed = tuple[Tensor, Tensor | None, Tensor | None]

torch.library.define(
    "taut::linear_fwd",
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor? weight_grad, {NORMED_SCHEMA}) -> Tensor",
)
torch.library.define("taut::linear_dgrad", "(Tensor dy, Tensor weight) -> Tensor")
torch.library.define("taut::linear_wgrad", "(Tensor dy, Tensor x) -> Tensor")
torch.library.define("taut::linear_wgrad_", "(Tensor(a!) total, Tensor dy, Tensor x) -> ()")
torch.library.define("taut::column_sum", "(Tensor x) -> Tensor")

# oneDNN must beat MKL by this factor at every probed form: a choice that flips with the noise of a
# timing would change the rounding from run to run.
_CLEAR_WIN = 1.25
_PROBE_SHAPE = (512, 768, 768)  # rows, columns in, columns out: 0.6 GFLOP, a few ms in all
_PROBE_ROUNDS = 5


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The truth every kernel is held to: plain PyTorch, differentiated by autograd."""
    return F.linear(x, weight, bias)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = bias if bias is None else bias.contiguous()  # its strides are not looked at
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@dataclass(frozen=True)
class Probe:
    """What was found about fp32 GEMMs on this CPU."""

    use_onednn: bool
    reason: str


@cache
def probe() -> Probe:
    """Time fp32 GEMMs through MKL and oneDNN, in the three forms of training, once per process."""
    if not torch.backends.mkldnn.is_available():
        return Probe(False, "this torch has no oneDNN")
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return Probe(False, "this torch has no mkldnn::_linear_pointwise")
    rows, width_in, width_out = _PROBE_SHAPE
    gen = torch.Generator().manual_seed(0)
    x, weight, dy = (
        torch.randn(shape, generator=gen)
        for shape in ((rows, width_in), (width_out, width_in), (rows, width_out))
    )
    ratios = []
    for a, b in ((x, weight), (dy, weight.t()), (dy.t(), x.t())):
        times: dict[Callable[..., Tensor], float] = {F.linear: math.inf, _onednn: math.inf}
        for _ in range(_PROBE_ROUNDS):
            for form in times:
                start = time.perf_counter()
                out = form(a, b, None)
                times[form] = min(times[form], time.perf_counter() - start)
        if not torch.allclose(out, F.linear(a, b), rtol=1e-4, atol=1e-3):
            return Probe(False, "oneDNN disagreed with F.linear in the probe")
        ratios.append(times[F.linear] / times[_onednn])
    shown = ", ".join(
        f"{form} {ratio:.2f}x"
        for form, ratio in zip(("forward", "dgrad", "wgrad"), ratios, strict=True)
    )
    won = min(ratios) >= _CLEAR_WIN
    return Probe(won, f"oneDNN against MKL: {shown}; {'oneDNN' if won else 'MKL'} taken")


def _takes_onednn(*tensors: Tensor | None) -> bool:
    if any(t is not None and (t.dtype != torch.float32 or t.numel() == 0) for t in tensors):
        return False
    return tensors[0] is not None and tensors[0].is_cpu and probe().use_onednn


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *_for_backward: Any) -> Tensor:
    """x weight^T + bias by the fastest correct GEMM. For the insides of ops: no autograd."""
    form = _onednn if _takes_onednn(x, weight, bias) else F.linear
    return form(x, weight, bias)


def _rows(x: Tensor) -> Tensor:
    return x.view(x.shape[:-1].numel(), x.shape[-1])


def dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    """dy weight."""
    return _onednn(dy, weight.t(), None) if _takes_onednn(dy, weight) else dy @ weight


def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x over all rows."""
    dy, x = _rows(dy), _rows(x)
    return _onednn(dy.t(), x.t(), None) if _takes_onednn(dy, x) else dy.t() @ x


def wgrad_(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """total += dy^T x, in one GEMM where dtypes allow."""
    if total.dtype == dy.dtype and not _takes_onednn(dy, x):
        total.addmm_(_rows(dy).t(), _rows(x))
    else:
        total.add_(wgrad(dy, x))


def rebuilt(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A norm's output from its x-hat, rounded once."""
    if weight is None:
        return xhat if bias is None else (xhat + bias).to(xhat.dtype)
    if bias is None:
        return (xhat * weight).to(xhat.dtype)
    return torch.addcmul(bias, xhat, weight).to(xhat.dtype)


def normed_arguments(op: str, normed: Normed | None, x: Tensor) -> tuple[Tensor | None, ...]:
    """The arguments of NORMED_SCHEMA, checked against the norm's output."""
    if normed is None:
        return None, None, None
    xhat, weight, bias = normed
    check_floating(op, x=x, xhat=xhat, weight=weight, bias=bias)
    check_alike(op, x=x, xhat=xhat)
    check_vector(op, x.shape[-1], weight=weight, bias=bias)
    return xhat.contiguous(), weight, bias


def column_sum(x: Tensor) -> Tensor:
    """The sum of all rows of x, accumulated in fp32 (float64 for float64)."""
    if x.is_cpu and native.takes(x):
        return native.column_sum(x)
    return _rows(x).sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


for _name, _form in (
    ("linear_fwd", forward),
    ("linear_dgrad", dgrad),
    ("linear_wgrad", wgrad),
    ("linear_wgrad_", wgrad_),
    ("column_sum", column_sum),
):
    torch.library.impl(f"taut::{_name}", "default", _form)


@torch.library.register_fake("taut::linear_fwd")
def _(x: Tensor, weight: Tensor, *_arguments: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.register_fake("taut::linear_dgrad")
def _(dy: Tensor, weight: Tensor) -> Tensor:
    return dy.new_empty(*dy.shape[:-1], weight.shape[1])


@torch.library.register_fake("taut::linear_wgrad")
def _(dy: Tensor, x: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[-1], x.shape[-1])


@torch.library.register_fake("taut::linear_wgrad_")
def _(total: Tensor, dy: Tensor, x: Tensor) -> None:
    return None


@torch.library.register_fake("taut::column_sum")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))


def _setup_context(ctx, inputs, output):
    x, weight, bias, weight_grad, *normed = inputs
    ctx.save_for_backward(weight, x if normed[0] is None else None, *normed)
    ctx.weight_grad = weight_grad  # not a saved tensor: other uses of the weight add to it first
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, dy):
    weight, x, *normed = ctx.saved_tensors
    need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
    dy = dy.contiguous()
    if need_weight and x is None:
        x = rebuilt(*normed)
    dx = torch.ops.taut.linear_dgrad(dy, weight) if need_x else None
    dweight = dbias = None
    if need_weight and ctx.weight_grad is not None:
        torch.ops.taut.linear_wgrad_(ctx.weight_grad, dy, x)
    elif need_weight:
        dweight = torch.ops.taut.linear_wgrad(dy, x)
    if need_bias:
        dbias = torch.ops.taut.column_sum(dy).to(ctx.bias_dtype)
    return dx, dweight, dbias, *(None,) * 4


register_autograd("linear_fwd", _backward, _setup_context)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_grad: Tensor | None = None,
    normed: Normed | None = None,
) -> Tensor:
    """x weight^T + bias. x: (..., D), weight: (F, D), bias: (F,), all of one dtype.

    weight_grad: a buffer shaped like the weight, of its dtype or float32. The backward pass adds
    the gradient of the weight to it and gives autograd none, so that accumulation costs no tensor.
    normed: where x is a norm's output, its x-hat, weight and bias: x-hat is kept in the place of x,
    which is rebuilt from it in the backward pass.
    """
    check_floating("linear", x=x, weight=weight, bias=bias, weight_grad=weight_grad)
    check_rows("linear", x=x)
    check_linear("linear", x.shape[-1], x.dtype, weight=weight, bias=bias)
    if weight_grad is not None and (
        weight_grad.shape != weight.shape
        or weight_grad.dtype not in (weight.dtype, torch.float32)
        or weight_grad.requires_grad
    ):
        raise ValueError(
            f"linear: weight_grad must be a {tuple(weight.shape)} buffer of {weight.dtype} or "
            f"float32 without a gradient of its own; got {tuple(weight_grad.shape)} "
            f"{weight_grad.dtype}, requires_grad={weight_grad.requires_grad}"
        )
    kept = normed_arguments("linear", normed, x)
    return torch.ops.taut.linear_fwd(x.contiguous(), weight.contiguous(), bias, weight_grad, *kept)
