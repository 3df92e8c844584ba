"""The generator of ops/random.py for Triton kernels, and the shape of block that suits it.

A block of rows of features has five axes:

    word      4: the words of a counter, 32 columns apart
    row       R rows
    tile      T tiles of 128 columns
    vector    32 / V: vectors that make up a word
    element   V columns side by side, one load of a thread; V / 2 counters

Triton gives a thread one vector, spreads vectors, tiles and rows over the threads, in this order,
and leaves all four words to the thread: where R * T * 32 / V is the number of threads, a thread's
calls of Philox decide the elements that it holds, and threads exchange nothing.
"""

from typing import Any

import triton
import triton.language as tl

from ..random import TILE, derive_key, keep_scale
from ..random import threshold as drop_threshold

MAX_TILES = 8  # 1024 columns: in 16-bit a warp holds as many
# Data, not shapes: specialised on their values, kernels would be compiled again and again.
UNSPECIALIZED = ("k0", "k1", "threshold", "num_rows", "group_rows")
# The element axis is spread first, for its columns are contiguous. The others follow from the last
# one on; before Triton 3.7 it was from the first one on.
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
IS_REVERSED = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


def dropout_arguments(
    p: float, seed: int, step: int, site: int, sample_ids: Any, positions: Any
) -> tuple[Any, ...]:
    """What kernels take for the arguments of SCHEMA, in their order."""
    return sample_ids, positions, *derive_key(seed, step, site), drop_threshold(p), keep_scale(p)


def block_shape(width: int, vector: int, num_warps: int) -> tuple[int, int]:
    """Rows and tiles of a block, for kernels that may cut rows anywhere: least padding first."""
    sizes = [2**i for i in range(MAX_TILES.bit_length())]
    tiles = min(sizes, key=lambda n: (triton.cdiv(width, TILE * n) * n, -n))
    return num_warps * vector // tiles, tiles


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32 with 7 rounds: four words, of the shape that the words of the counter make up."""
    for _ in tl.static_range(7):
        # one wide multiplication where a high and a low one would be two
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _tie_break(word):
    mixed = word * 0x9E3779B9
    return mixed ^ (mixed >> 15)


@triton.jit
def _choose(word, a, b, c, d):
    # each thread's words have constant numbers, so nothing of this is left in machine code
    return tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))


@triton.jit
def _pair(lower, upper, half):
    """Half 0 or 1 of two words side by side."""
    if IS_INTERPRETED:
        even = (upper << 16) | (lower & 0xFFFF)
        odd = (upper & 0xFFFF0000) | (lower >> 16)
        return tl.where(half == 0, even, odd)
    else:
        # LLVM would make vectors of these, and pack into bits what comes of comparing them
        selector = tl.where(half == 0, 0x5410, 0x7632)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [lower, upper, selector], tl.uint32, True, 1
        )


@triton.jit
def decide(word, half, group, position, plane, sample, k0, k1, threshold):
    """The decisions, True = kept, for columns c, where group = 16 * (c // 128) + c % 32 // 2.

    word = c // 32 % 4 needs an axis of its own and half = c % 2 should have one: Philox runs on the
    shape of the others. In attention plane is 1 + head, position the query's, and the column the
    position of the key.
    """
    position, sample = position.to(tl.uint32), sample.to(tl.uint32)
    plane, k0, k1 = tl.cast(plane, tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32)
    a, b, c, d = philox(group.to(tl.uint32), position, plane, sample, k0, k1)
    upper = _choose(word, a, b, c, d)
    lower = _choose(word, _tie_break(b), _tie_break(c), _tie_break(d), _tie_break(a))
    return _pair(lower, upper, half) >= threshold.to(tl.uint32)


@triton.jit
def keep(word, slot, position, plane, sample, k0, k1, threshold):
    """The decisions for columns 128 * (slot // 32) + 32 * word + slot % 32."""
    return decide(word, slot & 1, slot >> 1, position, plane, sample, k0, k1, threshold)


@triton.jit
def _word_axis(x):
    return x[None, None, None, :, None] if IS_REVERSED else x[:, None, None, None, None]


@triton.jit
def _tile_axis(x):
    return x[None, :, None, None, None] if IS_REVERSED else x[None, None, :, None, None]


@triton.jit
def _vector_axis(x):
    return x[:, None, None, None, None] if IS_REVERSED else x[None, None, None, :, None]


@triton.jit
def _slots(VECTOR: tl.constexpr):
    element = tl.arange(0, VECTOR)[None, None, None, None, :]
    return _vector_axis(tl.arange(0, 32 // VECTOR)) * VECTOR + element


@triton.jit
def row_axis(x):
    """What belongs to the rows of a block, to be broadcast over it."""
    return x[None, None, :, None, None] if IS_REVERSED else x[None, :, None, None, None]


@triton.jit
def row_sum(x):
    """The sums of the rows of a block: what lies in one thread first, threads then."""
    x = tl.sum(x, 4)
    if IS_REVERSED:
        return tl.sum(tl.sum(tl.sum(x, 3), 0), 0)
    else:
        return tl.sum(tl.sum(tl.sum(x, 0), 2), 1)


@triton.jit
def row_max(x):
    """The largest of each row of a block."""
    x = tl.max(x, 4)
    if IS_REVERSED:
        return tl.max(tl.max(tl.max(x, 3), 0), 0)
    else:
        return tl.max(tl.max(tl.max(x, 0), 2), 1)


@triton.jit
def block_columns(first, VECTOR: tl.constexpr, TILES: tl.constexpr, DROPOUT: tl.constexpr):
    """The columns of a block from column `first`, a multiple of 128, on.

    Without dropout words need not stay together, and the loads of a warp are contiguous.
    """
    word, tile = _word_axis(tl.arange(0, 4)), _tile_axis(tl.arange(0, TILES))
    if DROPOUT:
        return first + tile * 128 + word * 32 + _slots(VECTOR)
    else:
        return first + word * (32 * TILES) + tile * 32 + _slots(VECTOR)


@triton.jit
def load_rows(ptr, row, end, column, width, stride):
    """What lies in these columns of rows that are `stride` elements apart, 0 past the end."""
    mask = row_axis(row < end) & (column < width)
    return tl.load(ptr + row_axis(row) * stride + column, mask=mask, other=0.0)


@triton.jit
def block_zeros(VECTOR: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):
    if IS_REVERSED:
        return tl.zeros((32 // VECTOR, TILES, ROWS, 4, VECTOR), tl.float32)
    else:
        return tl.zeros((4, ROWS, TILES, 32 // VECTOR, VECTOR), tl.float32)


@triton.jit
def words_and_slots(first, VECTOR: tl.constexpr, TILES: tl.constexpr):
    """The columns of a block from column `first` on, as keep takes them."""
    word = _word_axis(tl.arange(0, 4))
    return word, first // 4 + _tile_axis(tl.arange(0, TILES)) * 32 + _slots(VECTOR)


@triton.jit
def kept(dropout, row, num_rows, first, VECTOR: tl.constexpr, TILES: tl.constexpr):
    """The decisions for a block of features: row (R,) of int64, columns from `first` on."""
    ids_ptr, positions_ptr, k0, k1, threshold = dropout
    position, sample = row, tl.zeros_like(row)
    if positions_ptr is not None:
        position = tl.load(positions_ptr + row, mask=row < num_rows, other=0)
    if ids_ptr is not None:
        sample = tl.load(ids_ptr + row, mask=row < num_rows, other=0)
    word, slot = words_and_slots(first, VECTOR, TILES)
    return keep(word, slot, row_axis(position), 0, row_axis(sample), k0, k1, threshold)
