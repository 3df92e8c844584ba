"""Triton kernels of ops/softmax_attention.py: softmax and dropout around products that torch makes.

A row lies in the registers of one block. Wider rows are walked through twice.
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
    block_shape,
    dropout_arguments,
    keep,
    row_axis,
    row_max,
    row_sum,
    words_and_slots,
)

NUM_WARPS = 4  # in 16-bit each holds a row of 1024 columns, or several narrow ones
# where a chunk begins and the numbers of the heads: data, not shapes
UNSPECIALIZED = (*UNSPECIALIZED, "first_row", "first_plane")


@triton.jit
def _load(ptr, row, num_rows, column, width, OTHER: tl.constexpr):
    offs = row_axis(row) * width + column
    mask = row_axis(row < num_rows) & (column < width)
    return tl.load(ptr + offs, mask=mask, other=OTHER).to(tl.float32)


@triton.jit
def _store(ptr, x, row, num_rows, column, width):
    offs = row_axis(row) * width + column
    tl.store(ptr + offs, x, mask=row_axis(row < num_rows) & (column < width))


@triton.jit
def _kept(
    dropout, places, row, num_rows, first, column, width, VECTOR: tl.constexpr, TILES: tl.constexpr
):
    """The decisions for a block of rows of scores and the keys from `first` on."""
    ids_ptr, positions_ptr, key_positions_ptr, k0, k1, threshold = dropout
    first_row, first_plane, heads, queries = places
    place = first_row + row.to(tl.int32)
    matrix, query = place // queries, place % queries
    sequence, plane = matrix // heads, first_plane + matrix % heads
    position, sample = query, sequence
    number = sequence.to(tl.int64) * queries + query  # of the query, over all sequences
    if positions_ptr is not None:
        position = tl.load(positions_ptr + number, mask=row < num_rows, other=0)
    if ids_ptr is not None:
        sample = tl.load(ids_ptr + number, mask=row < num_rows, other=0)
    if key_positions_ptr is not None:
        # keys in any order: each takes a call of Philox
        offs = row_axis(sequence.to(tl.int64)) * width + column
        mask = row_axis(row < num_rows) & (column < width)
        key = tl.load(key_positions_ptr + offs, mask=mask, other=0)
        word, slot = key // 32 % 4, key // 128 * 32 + key % 32
    else:
        word, slot = words_and_slots(first, VECTOR, TILES)
    of_row = (row_axis(position), row_axis(plane), row_axis(sample))
    return keep(word, slot, *of_row, k0, k1, threshold)


@triton.jit
def _finite(top):
    """What is taken off the scores of a row: nothing where it has no visible key."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _fwd_kernel(
    scores_ptr,
    p_ptr,
    dropped_ptr,
    ids_ptr,
    positions_ptr,
    key_positions_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    num_rows,
    width,
    first_row,
    first_plane,
    heads,
    queries,
    DROPOUT: tl.constexpr,
    IS_WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    dropout = (ids_ptr, positions_ptr, key_positions_ptr, k0, k1, threshold)
    places = (first_row, first_plane, heads, queries)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # every operand is loaded in the shape of the block, and so in one layout
    columns = block_columns(0, VECTOR, TILES, DROPOUT) + row_axis(row * 0).to(tl.int32)
    x = _load(scores_ptr, row, num_rows, columns, width, float("-inf"))
    top = row_max(x)
    power = tl.exp(x - row_axis(_finite(top)))
    total = row_sum(power)
    if IS_WIDE:
        for first in range(128 * TILES, width, 128 * TILES):
            x = _load(scores_ptr, row, num_rows, first + columns, width, float("-inf"))
            was, top = top, tl.maximum(top, row_max(x))
            shift = _finite(top)
            total = total * tl.exp(was - shift) + row_sum(tl.exp(x - row_axis(shift)))
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    for first in range(0, width, 128 * TILES):
        column = first + columns
        if IS_WIDE:
            x = _load(scores_ptr, row, num_rows, column, width, float("-inf"))
            power = tl.exp(x - row_axis(_finite(top)))
        p = power * row_axis(factor)
        _store(p_ptr, p, row, num_rows, column, width)
        if DROPOUT:
            kept = _kept(dropout, places, row, num_rows, first, column, width, VECTOR, TILES)
            _store(dropped_ptr, tl.where(kept, p, 0.0), row, num_rows, column, width)


@triton.jit
def _gradient(
    p_ptr,
    dp_ptr,
    ds_ptr,
    dropout,
    places,
    row,
    num_rows,
    first,
    columns,
    width,
    DROPOUT: tl.constexpr,
    VECTOR: tl.constexpr,
    TILES: tl.constexpr,
):
    """p, all that comes back to it, and what dropout leaves of it."""
    column = first + columns
    p = _load(p_ptr, row, num_rows, column, width, 0.0)
    gradient = _load(ds_ptr, row, num_rows, column, width, 0.0)
    dropped = p
    if DROPOUT:
        kept = _kept(dropout, places, row, num_rows, first, column, width, VECTOR, TILES)
        gradient, dropped = tl.where(kept, gradient, 0.0), tl.where(kept, p, 0.0)
    if dp_ptr is not None:
        gradient += _load(dp_ptr, row, num_rows, column, width, 0.0)
    return p, gradient, dropped


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _bwd_kernel(
    p_ptr,
    dp_ptr,
    ds_ptr,
    dropped_ptr,
    ids_ptr,
    positions_ptr,
    key_positions_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    num_rows,
    width,
    first_row,
    first_plane,
    heads,
    queries,
    DROPOUT: tl.constexpr,
    IS_WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    dropout = (ids_ptr, positions_ptr, key_positions_ptr, k0, k1, threshold)
    places = (first_row, first_plane, heads, queries)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = block_columns(0, VECTOR, TILES, DROPOUT) + row_axis(row * 0).to(tl.int32)
    p, gradient, dropped = _gradient(
        p_ptr,
        dp_ptr,
        ds_ptr,
        dropout,
        places,
        row,
        num_rows,
        0,
        columns,
        width,
        DROPOUT,
        VECTOR,
        TILES,
    )
    mean = row_sum(gradient * p)
    if IS_WIDE:
        for first in range(128 * TILES, width, 128 * TILES):
            p, gradient, _ = _gradient(
                p_ptr,
                dp_ptr,
                ds_ptr,
                dropout,
                places,
                row,
                num_rows,
                first,
                columns,
                width,
                DROPOUT,
                VECTOR,
                TILES,
            )
            mean += row_sum(gradient * p)
    for first in range(0, width, 128 * TILES):
        column = first + columns
        if IS_WIDE:
            p, gradient, dropped = _gradient(
                p_ptr,
                dp_ptr,
                ds_ptr,
                dropout,
                places,
                row,
                num_rows,
                first,
                columns,
                width,
                DROPOUT,
                VECTOR,
                TILES,
            )
        _store(ds_ptr, p * (gradient - row_axis(mean)), row, num_rows, column, width)
        if DROPOUT:
            _store(dropped_ptr, dropped, row, num_rows, column, width)


def _launch(
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    p: Tensor,  # (matrices, queries, keys)
    first: int,
    heads: int,
    dropout: tuple[Any, ...],  # the arguments of SCHEMA
    key_positions: Tensor | None,
    first_head: int,
) -> None:
    matrices, queries, width = p.shape
    num_rows = matrices * queries
    if num_rows == 0 or width == 0:
        return
    # keys in any order take four times the registers of Philox
    vector = min(16 // p.element_size(), 8 if key_positions is None else 4)
    rows, tiles = block_shape(width, vector, NUM_WARPS)
    ids, positions, k0, k1, threshold, _ = dropout_arguments(*dropout)
    with torch.cuda.device_of(p):
        kernel[(triton.cdiv(num_rows, rows),)](
            *tensors,
            ids,
            positions,
            key_positions,
            k0,
            k1,
            threshold,
            num_rows,
            width,
            first * queries,
            1 + first_head,
            heads,
            queries,
            DROPOUT=dropout[0] > 0,
            IS_WIDE=width > TILE * tiles,
            VECTOR=vector,
            ROWS=rows,
            TILES=tiles,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def softmax_fwd(
    scores: Tensor, p: Tensor, dropped: Tensor | None, first: int, heads: int, *arguments: Any
) -> None:
    *dropout, key_positions, first_head = arguments
    tensors = (scores, p, dropped)
    _launch(_fwd_kernel, tensors, p, first, heads, tuple(dropout), key_positions, first_head)


def softmax_bwd(
    p: Tensor,
    dp: Tensor | None,
    ds: Tensor,
    dropped: Tensor | None,
    first: int,
    heads: int,
    *arguments: Any,
) -> None:
    *dropout, key_positions, first_head = arguments
    tensors = (p, dp, ds, dropped)
    _launch(_bwd_kernel, tensors, p, first, heads, tuple(dropout), key_positions, first_head)
