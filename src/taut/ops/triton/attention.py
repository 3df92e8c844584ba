"""Triton kernels of ops/attention.py: forward, and what both passes share.

A program works on one tile of the queries of a sequence and one head, and walks over the keys that
they see. Tiles come longest first from a list that a small kernel makes on the device: nobody asks
the device for lengths, grids follow from shapes, and programs past the end of the list return.

Scores are exponents of 2: scale and log2(e) are one factor of an FMA. What the dropout keeps is
scaled once, at the end. Keys lie in a tile in an order, see key_order, in which a thread that holds
a part of a row of scores holds all that its counters of Philox decide.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .random import IS_INTERPRETED, decide, dropout_arguments

LOG2E = tl.constexpr(1 / math.log(2))
# Data, not shapes: specialised on their values, kernels would be compiled again and again.
UNSPECIALIZED = ("k0", "k1", "threshold", "first_head", "num_tiles", "num_sequences", "num_queries")


class Blocks(NamedTuple):
    """What a program works on at a time, and with what."""

    queries: int
    keys: int  # 32, 64 or 128
    num_warps: int
    num_stages: int
    is_lean: bool = False  # loops hoist nothing: where registers are worth more than what it saves


EVERYWHERE = (80, 90, 100)
Table = dict[tuple[int, int], dict[int, Blocks]]
# (heads up to this width, bytes of a number) -> blocks by class of GPU. The largest that take no
# more than 255 registers, and on sm_80, which stands for all GPUs with 99 KB of shared memory as
# well (sm_86, sm_89, sm_120), no more than that. 128 keys make the most of each call of Philox.
# In fp32 products are FMAs, whose operands lie in registers: small blocks.
BLOCKS: Table = {
    (64, 2): {80: Blocks(64, 128, 4, 2), 90: Blocks(128, 128, 8, 2), 100: Blocks(128, 128, 8, 2)},
    (128, 2): {80: Blocks(64, 32, 4, 2), 90: Blocks(128, 64, 8, 3), 100: Blocks(128, 64, 8, 2)},
    (256, 2): dict.fromkeys(EVERYWHERE, Blocks(64, 32, 8, 2)),
    (64, 4): dict.fromkeys(EVERYWHERE, Blocks(32, 32, 8, 1, True)),
    (128, 4): dict.fromkeys(EVERYWHERE, Blocks(16, 32, 8, 1, True)),
    (256, 4): dict.fromkeys(EVERYWHERE, Blocks(16, 32, 16, 1, True)),
}


def gpu_class(x: Tensor) -> int:
    major, _ = torch.cuda.get_device_capability(x.device) if x.is_cuda else (8, 0)
    return {9: 90, 10: 100}.get(major, 80)


def blocks_of(table: Table, x: Tensor) -> Blocks:
    width = next(w for w in (64, 128, 256) if x.shape[-1] <= w)
    return table[width, x.element_size()][gpu_class(x)]


@triton.jit
def _longer(
    cost, len_a, len_b, BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr, OF_KEYS: tl.constexpr
):
    """How many tiles of a sequence cost more than this."""
    tiles = tl.cdiv(len_a, BLOCK)
    count = tl.where(len_b > cost, tiles, 0)
    if IS_CAUSAL:
        if OF_KEYS:
            dear = tl.cdiv(tl.maximum(len_a - cost, 0), BLOCK)
        else:
            dear = tiles - tl.minimum(tl.cdiv(tl.maximum(cost + len_a - len_b, 0), BLOCK), tiles)
        count = tl.minimum(count, dear)
    return tl.where(cost < 0, tiles, count)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _schedule_kernel(
    tiles_ptr,
    cu_a_ptr,
    cu_b_ptr,
    num_tiles,
    num_sequences,
    BLOCK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    OF_KEYS: tl.constexpr,
    TILES: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Writes each tile of one sequence at its rank among all tiles: (sequence, tile).

    Its cost is what its first row sees of the other side. The rank is the number of tiles that cost
    more, and of those before it that cost as much: counted by sequence, since costs are in order.
    """
    sequence = tl.program_id(0)
    len_a = tl.load(cu_a_ptr + sequence + 1) - tl.load(cu_a_ptr + sequence)
    len_b = tl.load(cu_b_ptr + sequence + 1) - tl.load(cu_b_ptr + sequence)
    num_used = 0
    for first in range(0, num_sequences, SEQUENCES):
        other = first + tl.arange(0, SEQUENCES)
        start = tl.load(cu_a_ptr + other, mask=other < num_sequences, other=0)
        end = tl.load(cu_a_ptr + other + 1, mask=other < num_sequences, other=0)
        num_used += tl.sum(tl.cdiv(end - start, BLOCK))
    # no more places are left than there are sequences: each marks one
    place = num_used + sequence
    tl.store(tiles_ptr + 2 * place, -1, mask=place < num_tiles)
    for first_tile in range(0, tl.cdiv(len_a, BLOCK), TILES):
        tile = first_tile + tl.arange(0, TILES)
        cost, shared = len_b + tile * 0, len_b
        if IS_CAUSAL:
            if OF_KEYS:  # aligned to the end: as many queries see a key as come from it on
                cost = tl.minimum(cost, len_a - tile * BLOCK)
            else:
                cost, shared = tl.maximum(tile * BLOCK + 1 + len_b - len_a, 0), 0
        # in a sequence only tiles at one end cost the same
        rank = tl.where(cost == shared, tile, 0)
        for first in range(0, num_sequences, SEQUENCES):
            other = (first + tl.arange(0, SEQUENCES))[None, :]
            is_one = other < num_sequences
            a = tl.load(cu_a_ptr + other + 1, mask=is_one, other=0)
            b = tl.load(cu_b_ptr + other + 1, mask=is_one, other=0)
            a -= tl.load(cu_a_ptr + other, mask=is_one, other=0)
            b -= tl.load(cu_b_ptr + other, mask=is_one, other=0)
            longer = _longer(cost[:, None], a, b, BLOCK, IS_CAUSAL, OF_KEYS)
            as_long = _longer(cost[:, None] - 1, a, b, BLOCK, IS_CAUSAL, OF_KEYS) - longer
            rank += tl.sum(longer + tl.where(other < sequence, as_long, 0), 1)
        is_tile = tile * BLOCK < len_a
        tl.store(tiles_ptr + 2 * rank, sequence, mask=is_tile)
        tl.store(tiles_ptr + 2 * rank + 1, tile, mask=is_tile)


def schedule(
    cu_a: Tensor, cu_b: Tensor, tokens: int, block: int, causal: bool, of_keys: bool
) -> Tensor:
    """(tiles, 2): sequence and number of each tile of a, longest first; at the end -1."""
    num_sequences = cu_a.shape[0] - 1
    num_tiles = tokens // block + num_sequences  # each sequence has one that is not full at most
    tiles = cu_a.new_empty(num_tiles, 2)
    with torch.cuda.device_of(cu_a):
        _schedule_kernel[(num_sequences,)](
            tiles,
            cu_a,
            cu_b,
            num_tiles,
            num_sequences,
            BLOCK=block,
            IS_CAUSAL=causal,
            OF_KEYS=of_keys,
            TILES=16,
            SEQUENCES=64,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return tiles


@triton.jit
def dot(a, b, acc=None):
    if IS_INTERPRETED:  # it multiplies bf16 numbers as if their bits were integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def key_order(KEYS: tl.constexpr, AS_ROWS: tl.constexpr):
    """Which keys the columns, or rows, of a tile of scores are.

    One counter of Philox decides pairs of keys 32 apart. A thread of a tensor core holds pairs of
    columns 8 apart, of which warps side by side may share out those 8 apart and the two halves:
    columns 16 apart are keys 32 apart. Of rows it holds two 8 apart: a pair.
    """
    i = tl.arange(0, KEYS)
    if AS_ROWS:
        return i // 16 * 16 + i % 8 * 2 + i // 8 % 2
    else:
        return i // 16 % (KEYS // 32) * 32 + i // (KEYS // 2) * 16 + i % 16


@triton.jit
def decisions(
    dropout,
    query,
    sample,
    first,
    len_k,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    AS_ROWS: tl.constexpr,
):
    """True = kept, for a tile of scores: query and sample (QUERIES,), keys from `first` on."""
    key_positions_ptr, plane, k0, k1, threshold = dropout
    if key_positions_ptr is not None:
        key = first + key_order(KEYS, AS_ROWS)
        key = tl.load(key_positions_ptr + key, mask=key < len_k, other=0).to(tl.uint32)
        if AS_ROWS:
            key, query, sample = key[:, None], query[None, :], sample[None, :]
        else:
            key, query, sample = key[None, :], query[:, None], sample[:, None]
        word, group = key // 32 % 4, key // 128 * 16 + key // 2 % 16
        return decide(word, key % 2, group, query, plane, sample, k0, k1, threshold)
    word, half = tl.arange(0, KEYS // 32), tl.arange(0, 2)
    if KEYS < 128:
        word += first // 32 % 4
    group = first // 128 * 16 + half[:, None] * 8 + tl.arange(0, 8)[None, :]
    if AS_ROWS:
        word, half = word[:, None, None, None, None], half[None, None, :, None, None]
        group = group[None, :, None, :, None]
        query, sample = query[None, None, None, None, :], sample[None, None, None, None, :]
    else:
        word, half = word[None, None, :, None, None], half[None, None, None, None, :]
        group = group[None, :, None, :, None]
        query, sample = query[:, None, None, None, None], sample[:, None, None, None, None]
    keep = decide(word, half, group, query, plane, sample, k0, k1, threshold)
    return tl.reshape(keep, (KEYS, QUERIES) if AS_ROWS else (QUERIES, KEYS))


@triton.jit
def load_tile(
    ptr, first, i, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Rows first + i of one head, 0 from column WIDTH and, where MASKED, from row `end` on."""
    column = tl.arange(0, BLOCK)
    # int64 once a tile, not in every thread
    ptrs = ptr + tl.cast(first, tl.int64) * stride + (i[:, None] * stride + column[None, :])
    if MASKED:
        mask = (first + i < end)[:, None] & (column < WIDTH)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0)
    elif WIDTH < BLOCK:
        return tl.load(ptrs, mask=(column < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_tile(ptr, x, first, i, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    ptrs = ptr + tl.cast(first, tl.int64) * stride + (i[:, None] * stride + column[None, :])
    mask = (first + i < end)[:, None] & (column < WIDTH)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def find_tile(tiles_ptr, cu_q_ptr, cu_k_ptr, num_heads):
    """Sequence (-1: none), tile and head of this program, where queries and keys start and end."""
    program = tl.program_id(0)
    place = program // num_heads
    sequence = tl.load(tiles_ptr + 2 * place)
    tile = tl.load(tiles_ptr + 2 * place + 1)
    at = tl.maximum(sequence, 0)
    start_q, start_k = tl.load(cu_q_ptr + at), tl.load(cu_k_ptr + at)
    len_q, len_k = tl.load(cu_q_ptr + at + 1) - start_q, tl.load(cu_k_ptr + at + 1) - start_k
    return sequence, tile, program % num_heads, start_q, start_k, len_q, len_k


@triton.jit
def coordinates(ids_ptr, positions_ptr, sequence, start, row, end):
    """Position and sample of queries, by number where none are given."""
    position, sample = row, row * 0 + sequence
    if positions_ptr is not None:
        position = tl.load(positions_ptr + start + row, mask=row < end, other=0).to(tl.uint32)
    if ids_ptr is not None:
        sample = tl.load(ids_ptr + start + row, mask=row < end, other=0).to(tl.uint32)
    return position, sample


@triton.jit
def _walk(
    state,
    of_queries,
    of_keys,
    begin,
    end,
    lengths,
    dropout,
    exponent,
    IS_CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    E: tl.constexpr,
    LEAN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the keys of [begin, end), all of them visible unless MASKED."""
    acc, total, top = state
    q, row, position, sample = of_queries
    k_ptr, v_ptr, stride_k, stride_v = of_keys
    len_q, len_k = lengths
    order = key_order(KEYS, False)
    for first in tl.range(begin, end, KEYS, disable_licm=LEAN):
        key = first + order
        k = load_tile(k_ptr, first, order, len_k, stride_k, WIDTH, E, MASKED)
        s = dot(q, tl.trans(k))
        if MASKED:
            is_visible = (key < len_k)[None, :]
            if IS_CAUSAL:
                is_visible &= key[None, :] <= row[:, None] + (len_k - len_q)
            s = tl.where(is_visible, s * exponent, -float("inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)  # no key seen as yet
            p = tl.exp2(s - shift[:, None])
        else:
            new_top = tl.maximum(top, tl.max(s, 1) * exponent)
            shift = new_top
            p = tl.exp2(s * exponent - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(p, 1)
        if DROPOUT:
            keep = decisions(dropout, position, sample, first, len_k, QUERIES, KEYS, False)
            p = tl.where(keep, p, 0.0)
        v = load_tile(v_ptr, first, order, len_k, stride_v, WIDTH, E, MASKED)
        acc = dot(p.to(v.dtype), v, acc * rescale[:, None])
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    cu_q_ptr,
    cu_k_ptr,
    stride_q,
    stride_k,
    stride_v,
    head_stride_q,
    head_stride_k,
    head_stride_v,
    num_heads,
    group,
    scale,
    ids_ptr,
    positions_ptr,
    k0: tl.uint32,
    k1: tl.uint32,
    threshold: tl.uint32,
    keep_scale,
    key_positions_ptr,
    first_head,
    IS_CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr,
    E: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    LEAN: tl.constexpr,
):
    found = find_tile(tiles_ptr, cu_q_ptr, cu_k_ptr, num_heads)
    sequence, tile, head, start_q, start_k, len_q, len_k = found
    if sequence < 0:
        return
    start_q, start_k, head = start_q.to(tl.int64), start_k.to(tl.int64), head.to(tl.int64)
    first = tile * QUERIES
    i = tl.arange(0, QUERIES)
    row = first + i
    position, sample = coordinates(ids_ptr, positions_ptr, sequence, start_q, row, len_q)
    if key_positions_ptr is not None:
        key_positions_ptr += start_k
    dropout = (key_positions_ptr, 1 + first_head + head.to(tl.int32), k0, k1, threshold)
    q_ptr += start_q * stride_q + head * head_stride_q
    k_ptr += start_k * stride_k + head // group * head_stride_k
    v_ptr += start_k * stride_v + head // group * head_stride_v
    q = load_tile(q_ptr, first, i, len_q, stride_q, WIDTH, E, True)
    exponent = scale * LOG2E
    seen, full = len_k, len_k
    if IS_CAUSAL:
        seen = tl.minimum(tl.maximum((tile + 1) * QUERIES + len_k - len_q, 0), len_k)
        full = tl.minimum(tl.maximum(tile * QUERIES + 1 + len_k - len_q, 0), len_k)
    full = full // KEYS * KEYS
    state = (
        tl.zeros((QUERIES, E), tl.float32),
        tl.zeros((QUERIES,), tl.float32),
        tl.full((QUERIES,), -float("inf"), tl.float32),
    )
    of_queries, of_keys = (q, row, position, sample), (k_ptr, v_ptr, stride_k, stride_v)
    lengths = (len_q, len_k)
    state = _walk(
        state,
        of_queries,
        of_keys,
        0,
        full,
        lengths,
        dropout,
        exponent,
        IS_CAUSAL,
        DROPOUT,
        WIDTH,
        QUERIES,
        KEYS,
        E,
        LEAN,
        False,
    )
    acc, total, top = _walk(
        state,
        of_queries,
        of_keys,
        full,
        seen,
        lengths,
        dropout,
        exponent,
        IS_CAUSAL,
        DROPOUT,
        WIDTH,
        QUERIES,
        KEYS,
        E,
        LEAN,
        True,
    )
    total = tl.where(total > 0.0, total, 1.0)  # without keys acc is zero, and top is -inf
    share = keep_scale / total
    out_ptr += (start_q * num_heads + head) * WIDTH
    store_tile(out_ptr, acc * share[:, None], first, i, len_q, num_heads * WIDTH, WIDTH, E)
    lse = top + tl.log2(total)
    lse_ptr += start_q * num_heads + head
    tl.store(lse_ptr + row.to(tl.int64) * num_heads, lse, mask=row < len_q)


def head_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of tokens, then of heads."""
    return *(x.stride(0) for x in tensors), *(x.stride(1) for x in tensors)


def kernel_arguments(
    scale: float,
    p: float,
    seed: int,
    step: int,
    site: int,
    ids: Tensor | None,
    positions: Tensor | None,
    key_positions: Tensor | None,
    first_head: int,
) -> tuple[Any, ...]:
    """From scale to first_head, in the order of the kernels."""
    dropout = dropout_arguments(p, seed, step, site, ids, positions)
    return scale, *dropout, key_positions, first_head


def kernel_options(x: Tensor, blocks: Blocks, causal: bool, p: float) -> dict[str, Any]:
    width = x.shape[-1]
    return {
        "IS_CAUSAL": causal,
        "DROPOUT": p > 0,
        "WIDTH": width,
        "E": max(16, triton.next_power_of_2(width)),
        "QUERIES": blocks.queries,
        "KEYS": blocks.keys,
        "LEAN": blocks.is_lean,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
        "maxnreg": min(255, 2048 // blocks.num_warps),  # left alone, the assembler may spill
        "enable_fp_fusion": True,
    }


def launch_fwd(
    tensors: tuple[Tensor, ...],  # q, k, v, out, lse
    tiles: Tensor,
    blocks: Blocks,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
    *where: Any,
) -> None:
    """Writes out and lse for the queries of these tiles."""
    q, k, v, *_ = tensors
    heads = q.shape[1]
    with torch.cuda.device_of(q):
        _fwd_kernel[(tiles.shape[0] * heads,)](
            *tensors,
            tiles,
            cu_seqlens_q,
            cu_seqlens_k,
            *head_strides(q, k, v),
            heads,
            heads // k.shape[1],
            *kernel_arguments(scale, *where),
            **kernel_options(q, blocks, causal, where[0]),
        )


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
    *where: Any,
) -> tuple[Tensor, Tensor]:
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    if q.numel() == 0:
        return out, lse
    blocks = blocks_of(BLOCKS, q)
    cu_seqlens = cu_seqlens_q, cu_seqlens_k
    tiles = schedule(*cu_seqlens, q.shape[0], blocks.queries, causal, False)
    launch_fwd((q, k, v, out, lse), tiles, blocks, *cu_seqlens, causal, scale, *where)
    return out, lse
