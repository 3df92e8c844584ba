"""Cross entropy of x weight^T + bias, a chunk of rows at a time: the logits are never whole.

    z = x weight^T + bias,   loss and dz as in ops/cross_entropy.py
    dx = dz weight,   dweight = dz^T x,   dbias = sum over rows of dz

A chunk of logits fits the last-level cache and becomes its own gradient there. The sum and the
mean take three GEMMs: the forward pass makes the gradients that are asked for and saves them alone,
the backward pass multiplies them by that of the loss. reduction="none" learns the gradient of each
row in the backward pass alone: it saves its inputs and makes the logits again, a fourth GEMM. Rows
without a target are left out of all GEMMs. The gradient of the weight is summed in fp32.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import native
from .autograd import register_autograd
from .checks import check_floating, check_linear, check_rows
from .cross_entropy import (
    CRITERION,
    Rows,
    check_targets,
    count,
    criterion,
    criterion_,
    cross_entropy_reference,
    of_rows,
    reduce,
    refuse_targets,
)
from .linear import column_sum, dgrad, forward, wgrad

INPUTS = f"Tensor x, Tensor weight, Tensor? bias, Tensor targets, {CRITERION}"
torch.library.define(
    "taut::linear_cross_entropy_fwd",
    f"({INPUTS}, str reduction, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "taut::linear_cross_entropy_bwd",
    f"(Tensor drows, {INPUTS}, bool[] needs) -> (Tensor, Tensor, Tensor)",
)
torch.library.define("taut::scale_", "(Tensor(a!) x, Tensor factor) -> ()")

# Fewer rows a chunk cost the GEMMs more than a chunk that leaves the cache does.
_MIN_ROWS = 128
_CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
_CACHE_BYTES = 32 << 20  # where the system does not tell
_KEPT_BYTES = 32 << 20  # malloc gives larger pieces back: each chunk would touch its pages anew
_CUDA_CHUNK_BYTES = 256 << 20  # a chunk's gradient of the weight takes two passes over that of all
# Rows of the weight whose gradient is made at a time, so that it is added while in the cache: in
# one piece of fresh memory it costs the GEMM up to half of its rate.
_WGRAD_BLOCK = 2048
# Columns of dz that are summed at a time in fp32: oneDNN sums them in one chain, whose rounding
# grows with its length, and is a tenth slower at 2048 and more.
_DGRAD_BLOCK = 512


@cache
def _cache_bytes() -> int:
    """The size of the last-level cache."""
    sizes = [
        int(size[1]) << {"": 0, "K": 10, "M": 20}[size[2]]
        for path in _CACHE_FOLDER.glob("index*/size")
        if (size := re.fullmatch(r"(\d+)([KM]?)\s*", path.read_text()))
    ]
    return max(sizes, default=_CACHE_BYTES)


def chunk_rows(rows: int, row_bytes: int, is_cuda: bool = False) -> int:
    """The rows of a chunk: as many as fit the cache, in chunks of about one size."""
    most_bytes = _CUDA_CHUNK_BYTES if is_cuda else min(_cache_bytes(), _KEPT_BYTES)
    most = max(_MIN_ROWS, most_bytes // row_bytes)
    chunks = max(-(-rows // most), 1)
    return min(-(-rows // (32 * chunks)) * 32, most)


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, Rows]:
    """The truth every kernel is held to: plain PyTorch, differentiated by autograd."""
    return cross_entropy_reference(F.linear(x, weight, bias), targets, **options)


class _WeightGradient:
    """dz^T x, summed over chunks in fp32."""

    def __init__(self, weight: Tensor, num_chunks: int) -> None:
        self.num_chunks, self.chunk = num_chunks, 0
        self.is_cpu = weight.is_cpu
        # bfloat16 sums are held as two halves: the upper one lies where the result will be
        self.is_split = weight.dtype == torch.bfloat16 and self.is_cpu and native.takes(weight)
        wide = torch.promote_types(weight.dtype, torch.float32)
        dtype = weight.dtype if self.is_split or num_chunks == 1 else wide
        self.dtype = weight.dtype
        self.total = native.with_huge_pages(weight.new_empty(weight.shape, dtype=dtype))
        self.low = (
            native.with_huge_pages(weight.new_empty(weight.shape, dtype=torch.int16))
            if self.is_split and num_chunks > 2
            else None
        )

    def add(self, dz: Tensor, x: Tensor) -> None:
        size = _WGRAD_BLOCK if self.is_cpu else dz.shape[1]
        is_last = self.chunk == self.num_chunks - 1
        for first in range(0, dz.shape[1], size):
            part = slice(first, first + size)
            grad = wgrad(dz[:, part], x)
            if self.chunk == 0:
                self.total[part].copy_(grad)
            elif self.is_split:
                low = None if self.low is None else self.low[part]
                native.accumulate(self.total[part], low, grad, self.chunk > 1, is_last)
            else:
                self.total[part].add_(grad)
        self.chunk += 1

    def result(self) -> Tensor:
        return self.total.to(self.dtype) if self.chunk else self.total.zero_().to(self.dtype)


def _dgrad(dz: Tensor, weight: Tensor) -> Tensor:
    if dz.dtype != torch.float32 or not dz.is_cpu:
        return dgrad(dz, weight)
    dx = dgrad(dz[:, :_DGRAD_BLOCK], weight[:_DGRAD_BLOCK])
    for first in range(_DGRAD_BLOCK, dz.shape[1], _DGRAD_BLOCK):
        part = slice(first, first + _DGRAD_BLOCK)
        dx.add_(dgrad(dz[:, part], weight[part]))
    return dx


def _rows_with_target(targets: Tensor, classes: int, ignore_index: int) -> Tensor | None:
    """Their numbers, or None if all have one.

    On a GPU this waits for the targets, unless a graph is being captured: that takes all rows, and
    where a target is no class the loss is NaN.
    """
    if targets.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    refuse_targets("linear_cross_entropy", targets, classes, ignore_index)
    has_target = targets != ignore_index
    return None if has_target.all() else has_target.nonzero()[:, 0]


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    *weights: Any,
    drows: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss and correctness of each row, and what is needed of dx, dweight and dbias."""
    need_x, need_weight, need_bias = needs
    classes, wide = weight.shape[0], torch.promote_types(x.dtype, torch.float32)
    kept = _rows_with_target(targets, classes, ignore_index)
    num_rows = targets.shape[0] if kept is None else kept.shape[0]
    make = torch.empty if kept is None else torch.zeros  # rows without a target are not visited
    loss = make(targets.shape, dtype=wide, device=x.device)
    correct = make(targets.shape, dtype=torch.bool, device=x.device)
    dx = make(x.shape if need_x else (0,), dtype=x.dtype, device=x.device)
    dbias = torch.zeros(classes if need_bias else 0, dtype=wide, device=x.device)
    size = chunk_rows(num_rows, classes * x.element_size(), x.is_cuda)
    starts = range(0, num_rows, max(size, 1))
    dweight = _WeightGradient(weight, len(starts)) if need_weight else None
    for first in starts:
        rows: Any = slice(first, first + size)
        rows = rows if kept is None else kept[rows]
        xs = x[rows]
        z = forward(xs, weight, bias)
        down = drows[rows] if drows is not None and any(needs) else None
        loss[rows], correct[rows] = criterion_(z, targets[rows], down, ignore_index, *weights)
        if need_x:
            dx[rows] = _dgrad(z, weight)
        if dweight is not None:
            dweight.add(z, xs)
        if need_bias:
            dbias += column_sum(z)
        del z  # the next chunk takes its memory
    none = x.new_empty(0)
    dbias = dbias.to(x.dtype)
    return loss, correct, dx, none if dweight is None else dweight.result(), dbias


@torch.library.impl("taut::linear_cross_entropy_fwd", "default")  # GEMMs and a kernel
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    *how, reduction, needs = arguments
    needs = [need and reduction != "none" for need in needs]
    wide = torch.promote_types(x.dtype, torch.float32)
    dloss = torch.ones((), dtype=wide, device=x.device)
    if reduction == "mean":
        dloss = dloss / count(targets, how[0])
    drows = dloss.expand(targets.shape).contiguous()
    loss, *rest = _run(x, weight, bias, targets, *how, drows=drows, needs=needs)
    return reduce(loss, targets, how[0], reduction), loss, *rest


@torch.library.impl("taut::linear_cross_entropy_bwd", "default")
def _(drows: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *how, needs = arguments
    return _run(x, *how, drows=drows, needs=needs)[2:]


@torch.library.impl("taut::scale_", "default")
def _(x: Tensor, factor: Tensor) -> None:
    if x.is_cuda and x.dtype != torch.float64:  # which is not waited for: its kernel looks itself
        from .triton.cross_entropy import scale_  # imported on use: a CPU install has no Triton

        scale_(x, factor)
        torch.autograd.graph.increment_version(x)
    elif x.is_cuda or factor != 1:
        x.mul_(factor)


def _fake_gradients(x, weight, needs):
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple(
        x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs, strict=True)
    )


@torch.library.register_fake("taut::linear_cross_entropy_fwd")
def _(x, weight, bias, targets, ignore_index, on_target, on_all, z_loss, reduction, needs):
    wide = torch.promote_types(x.dtype, torch.float32)
    needs = [need and reduction != "none" for need in needs]
    return (
        x.new_empty(targets.shape if reduction == "none" else (), dtype=wide),
        x.new_empty(targets.shape, dtype=wide),
        x.new_empty(targets.shape, dtype=torch.bool),
        *_fake_gradients(x, weight, needs),
    )


@torch.library.register_fake("taut::linear_cross_entropy_bwd")
def _(drows, x, weight, bias, targets, ignore_index, on_target, on_all, z_loss, needs):
    return _fake_gradients(x, weight, needs)


@torch.library.register_fake("taut::scale_")
def _(x: Tensor, factor: Tensor) -> None:
    return None


def _setup_context(ctx, inputs, output):
    x, weight, bias, targets, *ctx.criterion, ctx.reduction, needs = inputs
    _, rows, correct, *grads = output
    if ctx.reduction == "none":
        ctx.save_for_backward(x, weight, bias, targets)
    else:
        ctx.save_for_backward(*(g if need else None for g, need in zip(grads, needs, strict=True)))
    ctx.mark_non_differentiable(rows, correct, *grads)
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, *_):
    if dloss is None:
        return (None,) * 10
    needs = list(ctx.needs_input_grad[:3])
    if ctx.reduction == "none":
        x, weight, bias, targets = ctx.saved_tensors
        drows = of_rows(dloss, targets, ctx.criterion[0], "none")
        grads = torch.ops.taut.linear_cross_entropy_bwd(
            drows, x, weight, bias, targets, *ctx.criterion, needs
        )
    else:
        grads = ctx.saved_tensors
        # a graph that is kept may ask again; a traced one is of tensors of other types
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if is_kept or type(dloss) is not Tensor:
            grads = [g if g is None else g.clone() for g in grads]
        for grad in grads:
            if grad is not None:
                torch.ops.taut.scale_(grad, dloss)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 7


register_autograd("linear_cross_entropy_fwd", _backward, _setup_context)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    smoothing: str = "torch",
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: str = "sum",
    with_rows: bool = False,
) -> Tensor | tuple[Tensor, Rows]:
    """Cross entropy of the logits x weight^T + bias, which never exist as a whole.

    x: (..., D), weight: (V, D), bias: (V,), one dtype; targets: (...) class numbers. The loss is
    float32 for 16-bit tensors. Rows whose target is ignore_index cost nothing. reduction "mean"
    divides by the number of the other rows, and is 0 if there are none, where PyTorch gives NaN;
    "none" gives a loss a row, for a fourth GEMM. smoothing: whose form of label smoothing, "torch"
    or "fairseq". z_loss adds z_loss * logsumexp(logits)^2 to each row. with_rows returns
    (loss, Rows) at no cost.
    """
    op = "linear_cross_entropy"
    check_floating(op, x=x, weight=weight, bias=bias)
    check_rows(op, x=x)
    check_linear(op, x.shape[-1], x.dtype, weight=weight, bias=bias)
    if weight.shape[0] == 0:
        raise ValueError(f"{op}: weight must have at least one row, a class; got none")
    check_targets(op, targets, x.shape[:-1], x.device)
    arguments = criterion(
        op, weight.shape[0], label_smoothing, smoothing, ignore_index, z_loss, reduction
    )
    needs = [
        torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)
    ]
    loss, rows, correct, *_ = torch.ops.taut.linear_cross_entropy_fwd(
        x.reshape(-1, x.shape[-1]).contiguous(),
        weight.contiguous(),
        bias,
        targets.flatten().contiguous(),
        *arguments,
        reduction,
        needs,
    )
    loss = loss.view(targets.shape) if reduction == "none" else loss
    if not with_rows:
        return loss
    return loss, Rows(rows.view(targets.shape), correct.view(targets.shape))
