"""Triton kernels of ops/norm.py.

A row lies in the registers of one block. Wider rows are read twice: a first kernel leaves the two
numbers of each row that the second, which works on blocks of columns, needs.

Sums over rows are made in two stages, so that neither chance nor the GPU decides their order:
groups of rows, whose number follows from the number of rows, leave partial sums in fp32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..random import TILE
from .random import (
    UNSPECIALIZED,
    block_columns,
    block_zeros,
    dropout_arguments,
    kept,
    load_rows,
    row_axis,
    row_sum,
)

NUM_WARPS = 4  # forward: in 16-bit each holds a row of 1024 columns, or several narrow ones
MAX_TILES = 64  # forward: a row of 8192 columns in registers takes 16 warps in fp32
# Backward: sums of columns take three registers an element, so vectors of eight would leave
# registers for half the warps. 64 threads in 16-bit, 128 in fp32: few, so that small blocks fill
# each other's waits. Measured on an H200, as is MAX_GROUPS.
BACKWARD_VECTOR = 4
BACKWARD_MAX_TILES = 32  # 8 warps; 16 could have 128 registers only and would spill
WIDE_TILES = 8  # beyond: blocks of 1024 columns
MAX_GROUPS = 528  # of rows: four blocks for each multiprocessor of an H100 or H200
MIN_STEPS = 8  # blocks of rows in a group: bounds the traffic of partial sums


@triton.jit
def _load_sum(
    x_ptr,
    residual_ptr,
    x_bias_ptr,
    dropout,
    scale,
    row,
    first,
    num_rows,
    width,
    DROPOUT: tl.constexpr,
    VECTOR: tl.constexpr,
    TILES: tl.constexpr,
):
    """residual + dropout(x + x_bias), 0 outside, and where it stands."""
    # every operand is loaded in the shape of the block, and so in one layout
    column = block_columns(first, VECTOR, TILES, DROPOUT) + row_axis(row * 0).to(tl.int32)
    mask = row_axis(row < num_rows) & (column < width)
    offs = row_axis(row) * width + column
    z = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if x_bias_ptr is not None:
        z += tl.load(x_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if DROPOUT:
        # scaled after the choice, so that the addition below makes one instruction of both
        z = tl.where(kept(dropout, row, num_rows, first, VECTOR, TILES), z, 0.0) * scale
    if residual_ptr is not None:
        z += tl.load(residual_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return z, column, offs, mask


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _statistics_kernel(
    x_ptr,
    residual_ptr,
    x_bias_ptr,
    mean_ptr,
    rstd_ptr,
    ids_ptr,
    positions_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    scale,
    num_rows,
    width,
    eps,
    IS_RMS: tl.constexpr,
    DROPOUT: tl.constexpr,
    VECTOR: tl.constexpr,
    TILES: tl.constexpr,
):
    """Mean and rstd of one row, for rows wider than a block."""
    dropout = (ids_ptr, positions_ptr, k0, k1, threshold)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    mean = tl.zeros((1,), tl.float32)
    squares = tl.zeros((1,), tl.float32)  # of the differences from the mean
    for first in range(0, width, 128 * TILES):
        z, _, _, mask = _load_sum(
            x_ptr,
            residual_ptr,
            x_bias_ptr,
            dropout,
            scale,
            row,
            first,
            num_rows,
            width,
            DROPOUT,
            VECTOR,
            TILES,
        )
        if IS_RMS:
            squares += row_sum(z * z)
        else:
            # two passes over the block, joined to the blocks before by Chan's formula
            count = tl.minimum(width - first, 128 * TILES).to(tl.float32)
            share = count / (first + count)
            block_mean = row_sum(z) / count
            centred = tl.where(mask, z - row_axis(block_mean), 0.0)
            delta = block_mean - mean
            squares += row_sum(centred * centred) + delta * delta * (first * share)
            mean += delta * share
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, tl.rsqrt(squares / width + eps))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _fwd_kernel(
    x_ptr,
    residual_ptr,
    x_bias_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    xhat_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    ids_ptr,
    positions_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    scale,
    num_rows,
    width,
    eps,
    IS_RMS: tl.constexpr,
    DROPOUT: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    dropout = (ids_ptr, positions_ptr, k0, k1, threshold)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * (128 * TILES)
    z, column, offs, mask = _load_sum(
        x_ptr,
        residual_ptr,
        x_bias_ptr,
        dropout,
        scale,
        row,
        first,
        num_rows,
        width,
        DROPOUT,
        VECTOR,
        TILES,
    )
    if sum_ptr is not None:
        tl.store(sum_ptr + offs, z, mask=mask)
    if mean_ptr is not None:
        xhat = z - row_axis(tl.load(mean_ptr + row, mask=row < num_rows, other=0.0))
        rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
    else:
        xhat = z
        if not IS_RMS:
            xhat = tl.where(mask, z - row_axis(row_sum(z) / width), 0.0)
        rstd = tl.rsqrt(row_sum(xhat * xhat) / width + eps)
        tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
    xhat *= row_axis(rstd)
    tl.store(xhat_ptr + offs, xhat, mask=mask)
    y = xhat
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, y, mask=mask)


def norm_fwd(
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
    width = x.shape[-1]
    num_rows = x.numel() // width
    y, xhat = torch.empty_like(x), torch.empty_like(x)
    rstd = x.new_empty(num_rows, dtype=torch.float32)
    kept_sum = torch.empty_like(x) if with_sum else x.new_empty(0)
    if num_rows == 0:
        return y, xhat, rstd, kept_sum
    x_bias, weight, bias = (t if t is None else t.contiguous() for t in (x_bias, weight, bias))
    vector = 16 // x.element_size()
    tiles = triton.next_power_of_2(triton.cdiv(width, TILE))
    is_wide = tiles > MAX_TILES
    arguments = (*dropout_arguments(*dropout), num_rows, width, eps, is_rms, dropout[0] > 0, vector)
    mean = None
    with torch.cuda.device_of(x):
        if is_wide:
            mean, tiles = torch.empty_like(rstd), WIDE_TILES
            _statistics_kernel[(num_rows,)](
                x,
                residual,
                x_bias,
                mean,
                rstd,
                *arguments,
                TILES=MAX_TILES,
                num_warps=MAX_TILES // vector,
                enable_fp_fusion=True,
            )
        num_warps = max(NUM_WARPS, tiles // vector)
        rows = num_warps * vector // tiles
        _fwd_kernel[triton.cdiv(num_rows, rows), triton.cdiv(width, TILE * tiles)](
            x,
            residual,
            x_bias,
            weight,
            bias,
            y,
            xhat,
            kept_sum if with_sum else None,
            mean,
            rstd,
            *arguments,
            ROWS=rows,
            TILES=tiles,
            num_warps=num_warps,
            maxnreg=128,  # all that 16 warps can have; left alone, the assembler may spill
            enable_fp_fusion=True,
        )
    return y, xhat, rstd, kept_sum


@triton.jit
def _load_gradient(
    dy_ptr,
    xhat_ptr,
    weight_ptr,
    row,
    first,
    num_rows,
    width,
    DROPOUT: tl.constexpr,
    VECTOR: tl.constexpr,
    TILES: tl.constexpr,
):
    """dy, xhat and dy * weight, 0 outside, and where they stand."""
    column = block_columns(first, VECTOR, TILES, DROPOUT) + row_axis(row * 0).to(tl.int32)
    mask = row_axis(row < num_rows) & (column < width)
    offs = row_axis(row) * width + column
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    xhat = tl.load(xhat_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    g = dy
    if weight_ptr is not None:
        g = dy * tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    return dy, xhat, g, offs, mask


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _means_kernel(
    dy_ptr,
    xhat_ptr,
    weight_ptr,
    means_ptr,
    num_rows,
    width,
    IS_RMS: tl.constexpr,
    VECTOR: tl.constexpr,
    TILES: tl.constexpr,
):
    """mean(g * xhat) and mean(g) of one row, for rows wider than a block."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    along = tl.zeros((1,), tl.float32)
    mean = tl.zeros((1,), tl.float32)
    for first in range(0, width, 128 * TILES):
        _, xhat, g, _, _ = _load_gradient(
            dy_ptr, xhat_ptr, weight_ptr, row, first, num_rows, width, False, VECTOR, TILES
        )
        along += row_sum(g * xhat)
        if not IS_RMS:
            mean += row_sum(g)
    tl.store(means_ptr + row, along / width)
    tl.store(means_ptr + num_rows + row, mean / width)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _bwd_kernel(
    dy_ptr,
    dsum_ptr,
    xhat_ptr,
    rstd_ptr,
    weight_ptr,
    means_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_ptr,
    dbias_ptr,
    dx_bias_ptr,
    ids_ptr,
    positions_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    scale,
    num_rows,
    group_rows,
    width,
    IS_RMS: tl.constexpr,
    DROPOUT: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    dropout = (ids_ptr, positions_ptr, k0, k1, threshold)
    group = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (128 * TILES)
    dweight = block_zeros(VECTOR, ROWS, TILES)
    dbias = block_zeros(VECTOR, ROWS, TILES)
    dx_bias = block_zeros(VECTOR, ROWS, TILES)
    column = block_columns(first, VECTOR, TILES, DROPOUT)
    row = group * group_rows + tl.arange(0, ROWS)
    end = tl.minimum((group + 1) * group_rows, num_rows)
    next_dy = load_rows(dy_ptr, row, end, column, width, width)
    next_xhat = load_rows(xhat_ptr, row, end, column, width, width)
    for _ in range(0, group_rows, ROWS):
        dy, xhat = next_dy.to(tl.float32), next_xhat.to(tl.float32)
        # the next rows are on their way while these are worked on
        next_dy = load_rows(dy_ptr, row + ROWS, end, column, width, width)
        next_xhat = load_rows(xhat_ptr, row + ROWS, end, column, width, width)
        is_row = row < end
        offs = row_axis(row) * width + column
        mask = row_axis(is_row) & (column < width)
        g = dy
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        if dweight_ptr is not None:
            dweight += dy * xhat
            dbias += dy
        if means_ptr is not None:
            along = tl.load(means_ptr + row, mask=is_row, other=0.0)
            mean = tl.load(means_ptr + num_rows + row, mask=is_row, other=0.0)
        else:
            along = row_sum(g * xhat) / width
            mean = row_sum(g) / width
        dz = g - xhat * row_axis(along)
        if not IS_RMS:
            dz -= row_axis(mean)
        dz *= row_axis(tl.load(rstd_ptr + row, mask=is_row, other=0.0))
        if dsum_ptr is not None:
            dz += tl.load(dsum_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + offs, dz, mask=mask)
        if DROPOUT:
            dz = tl.where(kept(dropout, row, end, first, VECTOR, TILES), dz, 0.0) * scale
        tl.store(dx_ptr + offs, dz, mask=mask)
        if dx_bias_ptr is not None:
            dx_bias += dz  # 0 in rows outside, for dy, xhat and dsum are; columns are not stored
        row += ROWS
    # every row of the block leaves a partial sum, which saves the threads an exchange
    offs = row_axis(group * ROWS + tl.arange(0, ROWS)) * width + column
    if dweight_ptr is not None:
        tl.store(dweight_ptr + offs, dweight, mask=column < width)
        tl.store(dbias_ptr + offs, dbias, mask=column < width)
    if dx_bias_ptr is not None:
        tl.store(dx_bias_ptr + offs, dx_bias, mask=column < width)


def norm_bwd(
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
    width = dy.shape[-1]
    num_rows = dy.numel() // width
    weight = weight if weight is None else weight.contiguous()
    apart = with_residual and dropout[0] > 0  # else both gradients are one tensor
    dx = torch.empty_like(dy)
    dresidual = torch.empty_like(dy) if apart else dy.new_empty(0)
    tiles = triton.next_power_of_2(triton.cdiv(width, TILE))
    is_wide = tiles > BACKWARD_MAX_TILES
    tiles = WIDE_TILES if is_wide else tiles
    num_warps = max(dy.element_size(), tiles // BACKWARD_VECTOR)
    rows = num_warps * BACKWARD_VECTOR // tiles
    steps = max(MIN_STEPS, triton.cdiv(num_rows, MAX_GROUPS * rows))
    group_rows = rows * min(steps, triton.cdiv(num_rows, rows))
    groups = triton.cdiv(num_rows, group_rows) if num_rows else 0
    wanted = (with_affine, with_affine, with_x_bias)
    partial = rstd.new_empty(sum(wanted), groups * rows, width)
    parts = iter(partial)
    dweight, dbias, dx_bias = (next(parts) if want else None for want in wanted)
    means = rstd.new_empty(2, num_rows) if is_wide else None
    with torch.cuda.device_of(dy):
        if is_wide and num_rows:
            _means_kernel[(num_rows,)](
                dy,
                xhat,
                weight,
                means,
                num_rows,
                width,
                IS_RMS=is_rms,
                VECTOR=BACKWARD_VECTOR,
                TILES=BACKWARD_MAX_TILES,
                num_warps=BACKWARD_MAX_TILES // BACKWARD_VECTOR,
                enable_fp_fusion=True,
            )
        if num_rows:
            _bwd_kernel[groups, triton.cdiv(width, TILE * tiles)](
                dy,
                dsum,
                xhat,
                rstd,
                weight,
                means,
                dx,
                dresidual if apart else None,
                dweight,
                dbias,
                dx_bias,
                *dropout_arguments(*dropout),
                num_rows,
                group_rows,
                width,
                IS_RMS=is_rms,
                DROPOUT=dropout[0] > 0,
                VECTOR=BACKWARD_VECTOR,
                ROWS=rows,
                TILES=tiles,
                num_warps=num_warps,
                maxnreg=255,
                enable_fp_fusion=True,
            )
    sums = iter(partial.sum(1))
    return dx, dresidual, *(next(sums) if want else rstd.new_empty(0) for want in wanted)
