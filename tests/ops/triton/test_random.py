"""Dropout decisions of the Triton kernels, bit for bit those of ops/random.py."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from taut.ops.random import derive_key, keep_mask, keep_scale, philox, threshold, tie_break
from taut.ops.triton.random import (
    MAX_TILES,
    block_columns,
    block_shape,
    dropout_arguments,
    keep,
    kept,
    row_axis,
)
from tests.ops.triton.setting import DEVICE

WIDTHS = [1, 7, 63, 64, 65, 127, 128, 129, 300]


@triton.jit
def _features_kernel(
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
    decisions = kept(dropout, row, num_rows, first, VECTOR, TILES)
    tl.store(y_ptr + row_axis(row) * width + column, decisions.to(tl.int8), mask=mask)


@triton.jit
def _heads_kernel(
    y_ptr,
    plane,
    position,
    sample,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    QUERIES: tl.constexpr,
    TILES: tl.constexpr,
):
    """As attention asks: (query, tile, word, slot), in the order of the keys."""
    word = tl.arange(0, 4)[None, None, :, None]
    slot = tl.arange(0, TILES)[None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, :]
    query = position + tl.arange(0, QUERIES)[:, None, None, None]
    sample = tl.zeros_like(query) + sample
    decisions = tl.reshape(
        keep(word, slot, query, plane, sample, k0, k1, threshold), (QUERIES, TILES * 128)
    )
    offs = tl.arange(0, QUERIES)[:, None] * (TILES * 128) + tl.arange(0, TILES * 128)[None, :]
    tl.store(y_ptr + offs, decisions.to(tl.int8))


def features(rows, width, dropout, vector=8, tiles=None):
    fitted_rows, fitted_tiles = block_shape(width, vector, 4)
    tiles = tiles or fitted_tiles
    block_rows = 4 * vector // tiles if tiles != fitted_tiles else fitted_rows
    y = torch.full((rows, width), 7, dtype=torch.int8, device=DEVICE)
    _features_kernel[triton.cdiv(rows, block_rows), triton.cdiv(width, 128 * tiles)](
        y,
        *dropout_arguments(*dropout),
        rows,
        width,
        VECTOR=vector,
        ROWS=block_rows,
        TILES=tiles,
        enable_fp_fusion=True,
    )
    assert ((y == 0) | (y == 1)).all()
    return y == 1


def ids(*numbers):
    return torch.tensor(numbers, device=DEVICE)


SAMPLES = ids(5, 0, 2**32 - 1, 5, 77, 2**31, 1)
POSITIONS = ids(2**32 - 1, 3, 0, 4, 3, 2**31 - 1, 1000)


def test_kernels_run_in_the_interpreter_where_there_is_no_gpu():
    assert isinstance(_features_kernel, InterpretedFunction) == (DEVICE == "cpu")


@pytest.mark.parametrize("width", WIDTHS)
def test_masks_of_any_width(width):
    dropout = (0.3, 11, 2, 3, SAMPLES, POSITIONS)
    assert torch.equal(features(7, width, dropout), keep_mask((7, width), DEVICE, *dropout))


@pytest.mark.parametrize(
    "dropout",
    [
        (0.001, 0, 0, 0, SAMPLES, POSITIONS),
        (0.1, 2**63 - 1, 2**32 - 1, 2**32 - 1, SAMPLES, POSITIONS),
        (0.5, 2**40 + 1, 7, 2**31, SAMPLES, None),
        (0.9, 2**31, 2**31, 9, None, POSITIONS),
        (0.99, 1, 1, 1, None, None),
        (1 - 2**-24, 1, 1, 2, None, None),
        (2**-24, 1, 1, 3, None, None),
    ],
    ids=lambda dropout: f"p={dropout[0]}",
)
def test_masks_of_any_coordinates(dropout):
    assert torch.equal(features(7, 130, dropout), keep_mask((7, 130), DEVICE, *dropout))


def test_only_the_low_32_bits_of_coordinates_count():
    low = (0.5, 1, 2, 3, SAMPLES, POSITIONS)
    high = (0.5, 1, 2, 3, SAMPLES + 2**32, POSITIONS + 2**40)
    assert torch.equal(features(7, 64, low), features(7, 64, high))
    assert torch.equal(features(7, 64, high), keep_mask((7, 64), DEVICE, *high))


@pytest.mark.parametrize(("vector", "tiles"), [(8, 1), (8, 4), (4, 2), (4, 8), (2, 2)])
def test_block_shape_does_not_decide(vector, tiles):
    dropout = (0.5, 11, 2, 3, SAMPLES, POSITIONS)
    want = features(7, 1030, dropout)
    assert torch.equal(features(7, 1030, dropout, vector, tiles), want)


def test_ties_of_sixteen_bits():
    """Half a word decides but for one time in 2^16: site 7 has four of these times, 29 as well."""
    rows, width, p = 64, 2048, 0.3 + 2**-17
    for site, num_kept in ((7, 3), (29, 2)):
        want, below, above = (
            keep_mask((rows, width), DEVICE, q / 2**16, 5, 2, site)
            for q in (p * 2**16, threshold(p) >> 16, (threshold(p) >> 16) + 1)
        )
        ties = below & ~above
        assert (ties.sum(), (want & ties).sum()) == (4, num_kept)
        assert torch.equal(features(rows, width, (p, 5, 2, site, None, None)), want)


def test_decisions_of_attention():
    queries, tiles, plane, first, sample, p = 4, 2, 1 + 5, 2**31 - 2, 2**31 + 9, 0.2
    key = derive_key(3, 4, 5)
    y = torch.full((queries, tiles * 128), 7, dtype=torch.int8, device=DEVICE)
    _heads_kernel[(1,)](
        y, plane, first, sample, *key, threshold(p), queries, tiles, enable_fp_fusion=True
    )
    for query in range(queries):
        for column in range(tiles * 128):
            tile, word, slot = column // 128, column // 32 % 4, column % 32
            words = philox((16 * tile + slot // 2, first + query, plane, sample), key)
            upper, lower = (
                x >> 16 * (slot % 2) & 0xFFFF
                for x in (words[word], tie_break(words[(word + 1) % 4]))
            )
            assert y[query, column] == (upper << 16 | lower >= threshold(p))


def test_arguments_are_those_of_the_host():
    arguments = dropout_arguments(0.25, 2**40, 1, 2, SAMPLES, None)
    assert arguments[0] is SAMPLES
    assert arguments[1:] == (None, *derive_key(2**40, 1, 2), 2**30, keep_scale(0.25))


@pytest.mark.parametrize("width", [*WIDTHS, 768, 1024, 3072, 4097])
def test_block_has_no_idle_thread_and_little_padding(width):
    for vector, num_warps in ((8, 4), (4, 4), (4, 2)):
        rows, tiles = block_shape(width, vector, num_warps)
        assert rows * tiles * 32 // vector == 32 * num_warps
        assert tiles <= MAX_TILES
        assert triton.cdiv(width, 128 * tiles) * tiles == triton.cdiv(width, 128)
