"""Triton kernels of ops/embedding.py.

A row of the output lies in the registers of one block, as in norm.py; rows too wide for that take a
norm and a dropout of their own.

The gradient of a table has no atomics. Ids are sorted, equal ones in the order of their rows, and
cut into chunks: one block adds up a chunk. A sum that ends in its chunk goes to the table, the
others are left as partial sums, at most two a chunk, for a second kernel to join.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..random import NO_DROPOUT, TILE
from .dropout import dropout as apply_dropout
from .norm import (
    BACKWARD_MAX_TILES,
    BACKWARD_VECTOR,
    MAX_GROUPS,
    MAX_TILES,
    MIN_STEPS,
    NUM_WARPS,
    WIDE_TILES,
    norm_bwd,
    norm_fwd,
)
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

CHUNK = 32  # rows added up one after the other
JOINED = 8  # partial sums added up at a time
BLOCK = 256  # columns: 16 bytes a thread in fp32, and a width of 768 leaves no thread idle
SUM_WARPS = 2
OUTSIDE = "taut: embedding: ids, positions and types must lie in the rows of their tables"


@triton.jit
def _look_up(index_ptr, table_ptr, size, ok_ptr, row, num_rows, column, width):
    """Rows of a table in the shape of the block, 0 outside. An index outside is no address."""
    index = tl.load(index_ptr + row, mask=row < num_rows, other=0)
    is_inside = (index >= 0) & (index < size)
    tl.store(ok_ptr + row * 0, (row * 0).to(tl.uint8), mask=(row < num_rows) & ~is_inside)
    mask = row_axis(is_inside & (row < num_rows)) & (column < width)
    return tl.load(table_ptr + row_axis(index) * width + column, mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "size", "position_size", "type_size"))
def _fwd_kernel(
    ids_ptr,
    weight_ptr,
    positions_ptr,
    position_weight_ptr,
    types_ptr,
    type_weight_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    y_ptr,
    xhat_ptr,
    rstd_ptr,
    ok_ptr,
    size,
    position_size,
    type_size,
    token_scale,
    sample_ids_ptr,
    places_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    scale,
    num_rows,
    width,
    eps,
    DROPOUT: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * (128 * TILES)
    column = block_columns(first, VECTOR, TILES, DROPOUT) + row_axis(row * 0).to(tl.int32)
    mask = row_axis(row < num_rows) & (column < width)
    y = _look_up(ids_ptr, weight_ptr, size, ok_ptr, row, num_rows, column, width) * token_scale
    if position_weight_ptr is not None:
        y += _look_up(
            positions_ptr, position_weight_ptr, position_size, ok_ptr, row, num_rows, column, width
        )
    if type_weight_ptr is not None:
        y += _look_up(types_ptr, type_weight_ptr, type_size, ok_ptr, row, num_rows, column, width)
    offs = row_axis(row) * width + column
    if norm_weight_ptr is not None:
        y = tl.where(mask, y - row_axis(row_sum(y) / width), 0.0)
        rstd = tl.rsqrt(row_sum(y * y) / width + eps)
        tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
        y *= row_axis(rstd)
        tl.store(xhat_ptr + offs, y, mask=mask)
        y *= tl.load(norm_weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if norm_bias_ptr is not None:
            y += tl.load(norm_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if DROPOUT:
        dropout = (sample_ids_ptr, places_ptr, k0, k1, threshold)
        y = tl.where(kept(dropout, row, num_rows, first, VECTOR, TILES), y, 0.0) * scale
    tl.store(y_ptr + offs, y, mask=mask)


def embedding_fwd(
    ids: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    position_weight: Tensor | None,
    types: Tensor | None,
    type_weight: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    *dropout: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    width, has_norm = weight.shape[1], norm_weight is not None
    tables = (ids, weight, positions, position_weight, types, type_weight)
    is_wide = has_norm and width > TILE * MAX_TILES
    y = weight.new_empty(*ids.shape, width, dtype=torch.float32 if is_wide else None)
    if is_wide:
        nothing = y.new_empty(0)
        _launch_fwd(*tables, None, None, y, nothing, nothing, scale, eps, *NO_DROPOUT)
        y, xhat, rstd, _ = norm_fwd(
            y, None, None, norm_weight, norm_bias, eps, False, False, *NO_DROPOUT
        )
        y = apply_dropout(y, dropout)
        return y.to(weight.dtype), xhat.to(weight.dtype), rstd
    xhat = torch.empty_like(y) if has_norm else weight.new_empty(0)
    rstd = weight.new_empty(ids.numel() if has_norm else 0, dtype=torch.float32)
    vectors = (t if t is None else t.contiguous() for t in (norm_weight, norm_bias))
    _launch_fwd(*tables, *vectors, y, xhat, rstd, scale, eps, *dropout)
    return y, xhat, rstd


def _launch_fwd(
    ids: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    position_weight: Tensor | None,
    types: Tensor | None,
    type_weight: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    y: Tensor,
    xhat: Tensor,
    rstd: Tensor,
    scale: float,
    eps: float,
    *dropout: Any,
) -> None:
    num_rows, width = ids.numel(), weight.shape[1]
    if num_rows == 0:
        return
    vector = 16 // weight.element_size()
    tiles = triton.next_power_of_2(triton.cdiv(width, TILE))
    tiles = tiles if norm_weight is not None else min(tiles, WIDE_TILES)
    num_warps = max(NUM_WARPS, tiles // vector)
    rows = num_warps * vector // tiles
    ok = torch.ones(1, dtype=torch.uint8, device=ids.device)
    with torch.cuda.device_of(weight):
        _fwd_kernel[triton.cdiv(num_rows, rows), triton.cdiv(width, TILE * tiles)](
            ids,
            weight,
            positions,
            position_weight,
            types,
            type_weight,
            norm_weight,
            norm_bias,
            y,
            xhat,
            rstd,
            ok,
            *(0 if t is None else t.shape[0] for t in (weight, position_weight, type_weight)),
            scale,
            *dropout_arguments(*dropout),
            num_rows,
            width,
            eps,
            DROPOUT=dropout[0] > 0,
            VECTOR=vector,
            ROWS=rows,
            TILES=tiles,
            num_warps=num_warps,
            maxnreg=128,  # all that 16 warps can have; left alone, the assembler may spill
            enable_fp_fusion=True,
        )
    torch._assert_async(ok.view(torch.bool), OUTSIDE)  # on the device: the host does not wait


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _bwd_kernel(
    dy_ptr,
    xhat_ptr,
    rstd_ptr,
    norm_weight_ptr,
    dz_ptr,
    dnorm_weight_ptr,
    dnorm_bias_ptr,
    sample_ids_ptr,
    places_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    scale,
    num_rows,
    group_rows,
    width,
    DROPOUT: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """A group of rows, whose sums of columns are partial ones. Without xhat there is no norm."""
    dropout = (sample_ids_ptr, places_ptr, k0, k1, threshold)
    group = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (128 * TILES)
    dnorm_weight = block_zeros(VECTOR, ROWS, TILES)
    dnorm_bias = block_zeros(VECTOR, ROWS, TILES)
    column = block_columns(first, VECTOR, TILES, DROPOUT)
    row = group * group_rows + tl.arange(0, ROWS)
    end = tl.minimum((group + 1) * group_rows, num_rows)
    for _ in range(0, group_rows, ROWS):
        g = load_rows(dy_ptr, row, end, column, width, width).to(tl.float32)
        if DROPOUT:
            g = tl.where(kept(dropout, row, end, first, VECTOR, TILES), g, 0.0) * scale
        if xhat_ptr is not None:
            xhat = load_rows(xhat_ptr, row, end, column, width, width).to(tl.float32)
            if dnorm_weight_ptr is not None:
                dnorm_weight += g * xhat
                dnorm_bias += g
            g *= tl.load(norm_weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
            along = row_sum(g * xhat) / width
            g -= xhat * row_axis(along) + row_axis(row_sum(g) / width)
            g *= row_axis(tl.load(rstd_ptr + row, mask=row < end, other=0.0))
        mask = row_axis(row < end) & (column < width)
        tl.store(dz_ptr + row_axis(row) * width + column, g, mask=mask)
        row += ROWS
    if dnorm_weight_ptr is not None:
        # every row of the block leaves a partial sum, which saves the threads an exchange
        offs = row_axis(group * ROWS + tl.arange(0, ROWS)) * width + column
        tl.store(dnorm_weight_ptr + offs, dnorm_weight, mask=column < width)
        tl.store(dnorm_bias_ptr + offs, dnorm_bias, mask=column < width)


def embedding_bwd(
    dy: Tensor,
    xhat: Tensor | None,
    rstd: Tensor | None,
    norm_weight: Tensor | None,
    with_affine: bool,
    *dropout: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    width = dy.shape[-1]
    num_rows = dy.numel() // width
    tiles = triton.next_power_of_2(triton.cdiv(width, TILE))
    if tiles > BACKWARD_MAX_TILES and xhat is not None and rstd is not None:
        g, xhat = apply_dropout(dy.float(), dropout), xhat.float()
        dz, _, dnorm_weight, dnorm_bias, _ = norm_bwd(
            g, None, xhat, rstd, norm_weight, False, False, with_affine, False, *NO_DROPOUT
        )
        return dz, dnorm_weight, dnorm_bias
    dz = torch.empty_like(dy, dtype=torch.float32)
    is_summed = with_affine and xhat is not None
    tiles = tiles if xhat is not None else min(tiles, WIDE_TILES)
    num_warps = max(dy.element_size(), tiles // BACKWARD_VECTOR)
    rows = num_warps * BACKWARD_VECTOR // tiles
    steps = max(MIN_STEPS, triton.cdiv(num_rows, MAX_GROUPS * rows))
    group_rows = rows * min(steps, triton.cdiv(num_rows, rows))
    groups = triton.cdiv(num_rows, group_rows) if num_rows else 0
    partial = dz.new_empty(2, groups * rows, width) if is_summed else (None, None)
    if num_rows:
        with torch.cuda.device_of(dy):
            _bwd_kernel[groups, triton.cdiv(width, TILE * tiles)](
                dy,
                xhat,
                rstd,
                norm_weight if norm_weight is None else norm_weight.contiguous(),
                dz,
                *partial,
                *dropout_arguments(*dropout),
                num_rows,
                group_rows,
                width,
                DROPOUT=dropout[0] > 0,
                VECTOR=BACKWARD_VECTOR,
                ROWS=rows,
                TILES=tiles,
                num_warps=num_warps,
                maxnreg=255,
                enable_fp_fusion=True,
            )
    if not is_summed:
        return dz, dz.new_empty(0), dz.new_empty(0)
    return dz, *(part.sum(0) for part in partial)


@triton.jit
def _add_to_row(out_ptr, index, total, scale, padding, column, width):
    if index != padding:
        to = out_ptr + index * width + column
        was = tl.load(to, mask=column < width, other=0.0).to(tl.float32)
        tl.store(to, was + total * scale, mask=column < width)


@triton.jit(do_not_specialize=("num_rows", "padding"))
def _sum_kernel(
    dz_ptr,
    sorted_ptr,
    order_ptr,
    out_ptr,
    partial_ptr,
    scale,
    padding,
    num_rows,
    width,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk. Its partial sums: 2 c of the id that it begins with, 2 c + 1 of its last one."""
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, num_rows)
    index = tl.load(sorted_ptr + begin)
    began_before = tl.load(sorted_ptr + begin - 1, mask=begin > 0, other=-1) == index
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(begin, end):
        row = tl.load(order_ptr + i)
        total += tl.load(dz_ptr + row * width + column, mask=column < width, other=0.0).to(
            tl.float32
        )
        next_index = tl.load(sorted_ptr + i + 1, mask=i + 1 < num_rows, other=-1)
        goes_on = next_index == index
        if goes_on == 0 or i + 1 == end:
            if goes_on == 0 and began_before == 0:
                _add_to_row(out_ptr, index, total, scale, padding, column, width)
            else:
                slot = tl.where(began_before, 2 * chunk, 2 * chunk + 1)
                tl.store(partial_ptr + slot * width + column, total, mask=column < width)
            total = tl.zeros((BLOCK,), tl.float32)
            began_before = next_index != next_index
        index = next_index


@triton.jit(do_not_specialize=("num_rows", "padding"))
def _join_kernel(
    sorted_ptr,
    out_ptr,
    partial_ptr,
    scale,
    padding,
    num_rows,
    width,
    CHUNK: tl.constexpr,
    JOINED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum that begins in a chunk and goes on in the next ones, if there is one."""
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = chunk * CHUNK, (chunk + 1) * CHUNK
    index = tl.load(sorted_ptr + end - 1)  # there is a chunk after each program's own
    goes_on = tl.load(sorted_ptr + end) == index
    began_before = tl.load(sorted_ptr + begin - 1, mask=begin > 0, other=-1) == index
    if goes_on and began_before == 0:
        total = tl.load(
            partial_ptr + (2 * chunk + 1) * width + column, mask=column < width, other=0.0
        )
        count = JOINED
        other = chunk + 1
        while count == JOINED:
            others = other + tl.arange(0, JOINED)
            is_mine = (
                tl.load(sorted_ptr + others * CHUNK, mask=others * CHUNK < num_rows, other=-1)
                == index
            )
            mask = is_mine[:, None] & (column < width)[None, :]
            offs = (2 * others)[:, None] * width + column[None, :]
            total += tl.sum(tl.load(partial_ptr + offs, mask=mask, other=0.0), 0)
            count = tl.sum(is_mine.to(tl.int32))
            other += JOINED
        _add_to_row(out_ptr, index, total, scale, padding, column, width)


def embedding_wgrad(out: Tensor, dz: Tensor, ids: Tensor, scale: float, padding_idx: int) -> None:
    """Add the sums of the rows of dz by id to a table."""
    num_rows, width = ids.numel(), dz.shape[-1]
    if num_rows == 0:
        return
    index, order = torch.sort(ids.flatten(), stable=True)
    chunks, blocks = triton.cdiv(num_rows, CHUNK), triton.cdiv(width, BLOCK)
    partial = dz.new_empty(2 * chunks, width, dtype=torch.float32)
    tail = (scale, padding_idx, num_rows, width)
    with torch.cuda.device_of(dz):
        _sum_kernel[chunks, blocks](
            dz, index, order, out, partial, *tail, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=SUM_WARPS
        )
        if chunks > 1:
            _join_kernel[chunks - 1, blocks](
                index,
                out,
                partial,
                *tail,
                CHUNK=CHUNK,
                JOINED=JOINED,
                BLOCK=BLOCK,
                num_warps=SUM_WARPS,
            )
