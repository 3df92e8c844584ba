"""Triton kernel of ops/cross_entropy.py: a block a row, in two passes over its columns.

The second pass, for the gradient, finds the row in the L2 cache and may overwrite it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns at a time: in 16-bit two vectors of 16 bytes for each of 256 threads
NUM_WARPS = 8
# not compiled anew for every ignore_index; the number of classes decides the width of loads
UNSPECIALIZED = ["ignore_index"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _kernel(
    logits_ptr,
    targets_ptr,
    drows_ptr,
    grad_ptr,
    loss_ptr,
    stats_ptr,
    correct_ptr,
    stride,
    classes,
    ignore_index: tl.int64,
    on_target,
    on_all,
    z_loss,
    SMOOTHED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    offs = tl.arange(0, COLUMNS)
    if target == ignore_index:
        if loss_ptr is not None:
            tl.store(loss_ptr + row, 0.0)
            tl.store(correct_ptr + row, 0)
            tl.store(stats_ptr + 2 * row, 0.0)
            tl.store(stats_ptr + 2 * row + 1, 1.0)
        if drows_ptr is not None:
            for first in range(0, classes, COLUMNS):
                column = first + offs
                tl.store(grad_ptr + row * stride + column, 0.0, mask=column < classes)
    else:
        z_ptr = logits_ptr + row * stride
        if loss_ptr is not None:
            most = -3e38  # finite: the difference of two infinities would be NaN
            where = classes
            total = 0.0
            distance = 0.0
            for first in range(0, classes, COLUMNS):
                column = first + offs
                mask = column < classes
                z = tl.load(z_ptr + column, mask=mask, other=float("-inf")).to(tl.float32)
                block_most, block_where = tl.max(z, 0, return_indices=True)
                if block_most > most:
                    total *= tl.exp(most - block_most)
                    if SMOOTHED:
                        distance += first * (most - block_most)
                    most = block_most
                    where = first + block_where
                total += tl.sum(tl.exp(z - most), 0)
                if SMOOTHED:
                    distance += tl.sum(tl.where(mask, z - most, 0.0), 0)
            is_class = (target >= 0) & (target < classes)
            own = tl.load(z_ptr + target, mask=is_class, other=float("nan")).to(tl.float32)
            log_total = tl.log(total)
            lse = most + log_total
            loss = log_total - on_target * (own - most) + z_loss * lse * lse
            if SMOOTHED:
                loss -= on_all * distance
            tl.store(loss_ptr + row, loss)
            tl.store(correct_ptr + row, (where == target).to(tl.int8))
            tl.store(stats_ptr + 2 * row, most)
            tl.store(stats_ptr + 2 * row + 1, total)
        else:
            most = tl.load(stats_ptr + 2 * row)
            total = tl.load(stats_ptr + 2 * row + 1)
            lse = most + tl.log(total)
        if drows_ptr is not None:
            up = tl.load(drows_ptr + row)
            scale = up * (1 + 2 * z_loss * lse) / total
            for first in range(0, classes, COLUMNS):
                column = first + offs
                mask = column < classes
                z = tl.load(z_ptr + column, mask=mask, other=0.0).to(tl.float32)
                down = tl.where(column == target, up * (on_all + on_target), up * on_all)
                dz = tl.exp(z - most) * scale - down
                tl.store(grad_ptr + row * stride + column, dz, mask=mask)


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, size, COLUMNS: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        offs = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
        tl.store(x_ptr + offs, x * factor, mask=offs < size)


def scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor, a number on the device, without a pass over x where that is 1."""
    if x.numel():
        with torch.cuda.device_of(x):
            _scale_kernel[triton.cdiv(x.numel(), BLOCK),](
                x, factor, x.numel(), COLUMNS=BLOCK, num_warps=NUM_WARPS
            )


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    drows: Tensor | None,
    grad: Tensor | None,
    loss: Tensor | None,
    stats: Tensor,
    correct: Tensor | None,
    *criterion: Any,
) -> None:
    """Rows may lie apart: logits and grad have one stride."""
    num_rows, classes = logits.shape
    ignore_index, on_target, on_all, z_loss = criterion
    if num_rows:
        with torch.cuda.device_of(logits):
            _kernel[num_rows,](
                logits,
                targets,
                drows,
                grad,
                loss,
                stats,
                None if correct is None else correct.view(torch.int8),
                logits.stride(0),
                classes,
                ignore_index,
                on_target,
                on_all,
                z_loss,
                SMOOTHED=on_all > 0,
                COLUMNS=min(BLOCK, triton.next_power_of_2(classes)),
                num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )
