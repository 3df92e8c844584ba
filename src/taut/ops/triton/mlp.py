"""Triton kernels of ops/mlp.py: activation and dropout, and both gradients with the sum of rows.

Compiled without contraction of a * b + c, as ops/triton/gelu.py asks, so that the activation which
the backward kernel rebuilds has the bits of the forward kernel's.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..mlp import ACTIVATIONS
from ..random import TILE
from .gelu import gelu_value_and_slope, sigmoid
from .random import (
    UNSPECIALIZED,
    block_columns,
    block_shape,
    block_zeros,
    dropout_arguments,
    kept,
    load_rows,
    row_axis,
)

NUM_WARPS = 2  # in 16-bit each holds a row of 1024 columns; measured on an H200, as is MAX_GROUPS
BACKWARD_VECTOR = 4  # sums of columns, two with a gate, leave few registers for vectors of 8
BACKWARD_WARPS = 2  # then 1024 columns are one row, and a group of rows leaves one partial sum
MAX_GROUPS = 264  # of rows, for each block of columns: two for each multiprocessor
MIN_STEPS = 16  # blocks of rows in a group: bounds the traffic of partial sums


@triton.jit
def _activate(u, CODE: tl.constexpr):
    """The activation and its slope."""
    if CODE == 2:
        return tl.where(u <= 0, 0.0, u), tl.where(u <= 0, 0.0, 1.0)  # NaN goes through
    elif CODE == 3:
        s, slope = sigmoid(u * 1.4426950408889634)
        return u * s, tl.fma(u, slope, s)
    else:
        return gelu_value_and_slope(u, CODE == 1)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _fwd_kernel(
    u_ptr,
    a_ptr,
    ids_ptr,
    positions_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    scale,
    num_rows,
    width,
    CODE: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    dropout = (ids_ptr, positions_ptr, k0, k1, threshold)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * (128 * TILES)
    column = block_columns(first, VECTOR, TILES, DROPOUT)
    mask = row_axis(row < num_rows) & (column < width)
    offs = row_axis(row) * width + column
    if GATED:
        u_offs = row_axis(row) * (2 * width) + column
        up = tl.load(u_ptr + width + u_offs, mask=mask, other=0.0).to(tl.float32)
    else:
        u_offs = offs
    u = tl.load(u_ptr + u_offs, mask=mask, other=0.0).to(tl.float32)
    a, _ = _activate(u, CODE)
    if GATED:
        a *= up
    if DROPOUT:
        a = tl.where(kept(dropout, row, num_rows, first, VECTOR, TILES), a, 0.0) * scale
    tl.store(a_ptr + offs, a, mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _bwd_kernel(
    da_ptr,
    u_ptr,
    du_ptr,
    a_ptr,
    dbias_ptr,
    ids_ptr,
    positions_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    scale,
    num_rows,
    group_rows,
    width,
    CODE: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    dropout = (ids_ptr, positions_ptr, k0, k1, threshold)
    group = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (128 * TILES)
    column = block_columns(first, VECTOR, TILES, DROPOUT)
    u_width = width * 2 if GATED else width
    dbias = block_zeros(VECTOR, ROWS, TILES)
    dbias_up = block_zeros(VECTOR, ROWS, TILES)
    row = group * group_rows + tl.arange(0, ROWS)
    end = tl.minimum((group + 1) * group_rows, num_rows)
    next_da = load_rows(da_ptr, row, end, column, width, width)
    next_u = load_rows(u_ptr, row, end, column, width, u_width)
    for _ in range(0, group_rows, ROWS):
        da, u = next_da.to(tl.float32), next_u.to(tl.float32)
        # the next rows are on their way while these are worked on
        next_da = load_rows(da_ptr, row + ROWS, end, column, width, width)
        next_u = load_rows(u_ptr, row + ROWS, end, column, width, u_width)
        mask = row_axis(row < end) & (column < width)
        offs = row_axis(row) * width + column
        u_offs = row_axis(row) * u_width + column
        a, slope = _activate(u, CODE)
        if DROPOUT:
            keep = kept(dropout, row, end, first, VECTOR, TILES)
            da = tl.where(keep, da, 0.0) * scale
        if GATED:
            up = tl.load(u_ptr + width + u_offs, mask=mask, other=0.0).to(tl.float32)
            dup = da * a
            dbias_up += dup
            tl.store(du_ptr + width + u_offs, dup, mask=mask)
            da *= up
            a *= up
        if DROPOUT:
            a = tl.where(keep, a, 0.0) * scale
        tl.store(a_ptr + offs, a, mask=mask)
        du = da * slope
        dbias += du
        tl.store(du_ptr + u_offs, du, mask=mask)
        row += ROWS
    # every row of the block leaves a partial sum, which saves the threads an exchange
    offs = row_axis(group * ROWS + tl.arange(0, ROWS)) * u_width + column
    tl.store(dbias_ptr + offs, dbias, mask=column < width)
    if GATED:
        tl.store(dbias_ptr + width + offs, dbias_up, mask=column < width)


def activation_fwd(u: Tensor, activation: str, *dropout: Any) -> Tensor:
    code, gated = ACTIVATIONS[activation]
    width = u.shape[-1] // (2 if gated else 1)
    a = u.new_empty(*u.shape[:-1], width)
    num_rows = a.numel() // width
    vector = 16 // u.element_size()
    rows, tiles = block_shape(width, vector, NUM_WARPS)
    if num_rows:
        with torch.cuda.device_of(u):
            _fwd_kernel[triton.cdiv(num_rows, rows), triton.cdiv(width, TILE * tiles)](
                u,
                a,
                *dropout_arguments(*dropout),
                num_rows,
                width,
                CODE=code,
                GATED=gated,
                DROPOUT=dropout[0] > 0,
                VECTOR=vector,
                ROWS=rows,
                TILES=tiles,
                num_warps=NUM_WARPS,
                enable_fp_fusion=False,
            )
    return a


def activation_bwd(
    da: Tensor, u: Tensor, activation: str, *dropout: Any
) -> tuple[Tensor, Tensor, Tensor]:
    code, gated = ACTIVATIONS[activation]
    width = da.shape[-1]
    num_rows = da.numel() // width
    rows, tiles = block_shape(width, BACKWARD_VECTOR, BACKWARD_WARPS)
    steps = max(MIN_STEPS, triton.cdiv(num_rows, MAX_GROUPS * rows))
    group_rows = rows * min(steps, triton.cdiv(num_rows, rows))
    groups = triton.cdiv(num_rows, group_rows) if num_rows else 0
    du, a = torch.empty_like(u), torch.empty_like(da)
    dbias = u.new_empty(groups * rows, u.shape[-1], dtype=torch.float32)
    if num_rows:
        with torch.cuda.device_of(u):
            _bwd_kernel[groups, triton.cdiv(width, TILE * tiles)](
                da,
                u,
                du,
                a,
                dbias,
                *dropout_arguments(*dropout),
                num_rows,
                group_rows,
                width,
                CODE=code,
                GATED=gated,
                DROPOUT=dropout[0] > 0,
                VECTOR=BACKWARD_VECTOR,
                ROWS=rows,
                TILES=tiles,
                num_warps=BACKWARD_WARPS,
                maxnreg=255,  # left alone, the assembler may spill to save a few
                enable_fp_fusion=False,
            )
    return du, a, dbias.sum(0)
