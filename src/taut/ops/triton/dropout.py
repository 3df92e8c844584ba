"""Triton kernel of ops/dropout.py."""

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
    kept,
    row_axis,
)

NUM_WARPS = 4  # in 16-bit each holds a row of 1024 columns, or several narrow ones


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _kernel(
    x_ptr,
    y_ptr,
    ids_ptr,
    positions_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    scale,
    num_rows,
    width,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    dropout = (ids_ptr, positions_ptr, k0, k1, threshold)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * (128 * TILES)
    column = block_columns(first, VECTOR, TILES, True)
    mask = row_axis(row < num_rows) & (column < width)
    offs = row_axis(row) * width + column
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = tl.where(kept(dropout, row, num_rows, first, VECTOR, TILES), x, 0.0) * scale
    tl.store(y_ptr + offs, y, mask=mask)


def dropout(x: Tensor, dropout: tuple[Any, ...]) -> Tensor:
    if dropout[0] == 0.0:
        return x.clone()
    y = torch.empty_like(x)
    width = x.shape[-1]
    num_rows = x.numel() // width
    vector = 16 // x.element_size()
    rows, tiles = block_shape(width, vector, NUM_WARPS)
    if num_rows:
        with torch.cuda.device_of(x):
            _kernel[triton.cdiv(num_rows, rows), triton.cdiv(width, TILE * tiles)](
                x,
                y,
                *dropout_arguments(*dropout),
                num_rows,
                width,
                VECTOR=vector,
                ROWS=rows,
                TILES=tiles,
                num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )
    return y
