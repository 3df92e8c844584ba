"""Triton kernels of ops/attention.py, backward: one for dq, which goes as forward does, and one for
dk and dv, whose programs hold a tile of keys and walk over the queries that see them. Scores are
computed in both, so that no two programs write to one place: the same bits in every run.

The scale of what a dropout keeps, c, is left to the end: ds / c = p * (keep * dp - delta / c).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import (
    EVERYWHERE,
    LOG2E,
    UNSPECIALIZED,
    Blocks,
    Table,
    blocks_of,
    coordinates,
    decisions,
    dot,
    find_tile,
    head_strides,
    kernel_arguments,
    kernel_options,
    key_order,
    load_tile,
    schedule,
    store_tile,
)

# See BLOCKS. Rows of a product are shared out among warps by 16: of queries here, of keys below.
BLOCKS_Q: Table = {
    (64, 2): dict.fromkeys(EVERYWHERE, Blocks(128, 64, 8, 2)),
    (128, 2): {80: Blocks(64, 32, 4, 2), 90: Blocks(128, 64, 8, 2), 100: Blocks(128, 64, 8, 2)},
    (256, 2): dict.fromkeys(EVERYWHERE, Blocks(32, 32, 4, 1)),
    (64, 4): dict.fromkeys(EVERYWHERE, Blocks(16, 32, 4, 1, True)),
    (128, 4): dict.fromkeys(EVERYWHERE, Blocks(16, 32, 8, 1, True)),
    (256, 4): dict.fromkeys(EVERYWHERE, Blocks(16, 32, 8, 1, True)),
}
# dk and dv together take twice the registers of out.
BLOCKS_K: Table = {
    (64, 2): {
        80: Blocks(32, 64, 4, 2),
        90: Blocks(64, 128, 8, 2, True),
        100: Blocks(64, 128, 8, 2, True),
    },
    (128, 2): {
        80: Blocks(16, 64, 4, 2),
        90: Blocks(32, 128, 8, 2, True),
        100: Blocks(32, 128, 8, 2, True),
    },
    (256, 2): dict.fromkeys(EVERYWHERE, Blocks(32, 32, 8, 1)),
    (64, 4): dict.fromkeys(EVERYWHERE, Blocks(32, 32, 4, 1)),
    (128, 4): dict.fromkeys(EVERYWHERE, Blocks(32, 32, 8, 1)),
    (256, 4): dict.fromkeys(EVERYWHERE, Blocks(16, 32, 8, 1)),
}


@triton.jit
def _score_gradient(
    a,
    b,
    da,
    db,
    statistics,
    is_visible,
    keep,
    exponent,
    DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """p, what the dropout keeps of it, and ds / c, for queries and keys as rows or as columns."""
    lse, delta, share = statistics
    p = tl.exp2(dot(a, tl.trans(b)) * exponent - lse)
    if a.dtype == tl.float32:
        p *= share
    if MASKED:
        p = tl.where(is_visible, p, 0.0)
    dp = dot(da, tl.trans(db))
    kept_p = p
    if DROPOUT:
        kept_p = tl.where(keep, p, 0.0)
        if a.dtype == tl.float32:
            dp = tl.where(keep, dp, 0.0)
        else:  # one choice less; what it costs is far below the rounding of ds to 16 bits
            return p, kept_p, kept_p * dp - p * delta
    return p, kept_p, p * (dp - delta)


@triton.jit
def _walk_keys(
    sums,
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
    FIRST: tl.constexpr,
):
    """Over the keys of [begin, end), adds to dq, or in a first walk up p and p * dp."""
    dq, total, mean = sums
    q, dout, statistics, row, position, sample = of_queries
    k_ptr, v_ptr, stride_k, stride_v = of_keys
    len_q, len_k = lengths
    order = key_order(KEYS, False)
    for first in tl.range(begin, end, KEYS, disable_licm=LEAN):
        key = first + order
        k = load_tile(k_ptr, first, order, len_k, stride_k, WIDTH, E, MASKED)
        v = load_tile(v_ptr, first, order, len_k, stride_v, WIDTH, E, MASKED)
        is_visible = (key < len_k)[None, :]
        if IS_CAUSAL:
            is_visible &= key[None, :] <= row[:, None] + (len_k - len_q)
        keep = None
        if DROPOUT:
            keep = decisions(dropout, position, sample, first, len_k, QUERIES, KEYS, False)
        terms = _score_gradient(
            q, k, dout, v, statistics, is_visible, keep, exponent, DROPOUT, MASKED
        )
        if FIRST:
            total += tl.sum(terms[0], 1)
            mean += tl.sum(terms[2], 1)
        else:
            dq = dot(terms[2].to(k.dtype), k, dq)
    return dq, total, mean


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _bwd_q_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    out_ptr,
    lse_ptr,
    statistics_ptr,
    dq_ptr,
    tiles_ptr,
    cu_q_ptr,
    cu_k_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_dout,
    stride_out,
    head_stride_q,
    head_stride_k,
    head_stride_v,
    head_stride_dout,
    head_stride_out,
    num_queries,
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
    """dq, and for the other kernel, by head: lse, delta / c, the share of p in a sum of 1."""
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
    dout_ptr += start_q * stride_dout + head * head_stride_dout
    out_ptr += start_q * stride_out + head * head_stride_out
    dout = load_tile(dout_ptr, first, i, len_q, stride_dout, WIDTH, E, True)
    out = load_tile(out_ptr, first, i, len_q, stride_out, WIDTH, E, True)
    at = start_q * num_heads + head
    lse = tl.load(lse_ptr + at + row * num_heads, mask=row < len_q, other=0.0)
    q = load_tile(q_ptr, first, i, len_q, stride_q, WIDTH, E, True)
    seen, full = len_k, len_k
    if IS_CAUSAL:
        seen = tl.minimum(tl.maximum((tile + 1) * QUERIES + len_k - len_q, 0), len_k)
        full = tl.minimum(tl.maximum(tile * QUERIES + 1 + len_k - len_q, 0), len_k)
    full = full // KEYS * KEYS
    of_keys, lengths = (k_ptr, v_ptr, stride_k, stride_v), (len_q, len_k)
    zero, exponent = tl.zeros((QUERIES,), tl.float32), scale * LOG2E
    sums = (tl.zeros((QUERIES, E), tl.float32), zero, zero)
    if q_ptr.dtype.element_ty == tl.float32:
        # in fp32 the rounding of lse and out counts: a walk of its own finds what p adds up to, and
        # delta
        share = zero + 1.0
        statistics = (lse[:, None], zero[:, None], share[:, None])
        of_queries = (q, dout, statistics, row, position, sample)
        sums = _walk_keys(
            sums,
            of_queries,
            of_keys,
            0,
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
            True,
        )
        share = 1.0 / tl.where(sums[1] > 0.0, sums[1], 1.0)
        delta = sums[2] * share
    else:
        share = zero
        delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1) / keep_scale
    statistics = (lse[:, None], delta[:, None], share[:, None])
    of_queries = (q, dout, statistics, row, position, sample)
    sums = _walk_keys(
        sums,
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
        False,
    )
    sums = _walk_keys(
        sums,
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
        False,
    )
    statistics_ptr += head * num_queries + start_q + row
    tl.store(statistics_ptr, lse, mask=row < len_q)
    tl.store(statistics_ptr + num_heads * num_queries, delta, mask=row < len_q)
    if q_ptr.dtype.element_ty == tl.float32:
        tl.store(statistics_ptr + 2 * num_heads * num_queries, share, mask=row < len_q)
    store_tile(
        dq_ptr + at * WIDTH,
        sums[0] * (scale * keep_scale),
        first,
        i,
        len_q,
        num_heads * WIDTH,
        WIDTH,
        E,
    )


@triton.jit
def _walk_queries(
    dk,
    dv,
    k,
    v,
    first_key,
    q_ptr,
    dout_ptr,
    statistics_ptr,
    of_heads,
    ids_ptr,
    positions_ptr,
    sequence,
    start_q,
    stride_q,
    stride_dout,
    begin,
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
):
    len_q, len_k = lengths
    key = first_key + key_order(KEYS, True)
    i = tl.arange(0, QUERIES)
    for first in tl.range(begin, len_q, QUERIES, disable_licm=LEAN):
        row = first + i
        q = load_tile(q_ptr, first, i, len_q, stride_q, WIDTH, E, True)
        dout = load_tile(dout_ptr, first, i, len_q, stride_dout, WIDTH, E, True)
        lse = tl.load(statistics_ptr + row, mask=row < len_q, other=0.0)
        delta = tl.load(statistics_ptr + of_heads + row, mask=row < len_q, other=0.0)
        share = lse
        if q_ptr.dtype.element_ty == tl.float32:
            share = tl.load(statistics_ptr + 2 * of_heads + row, mask=row < len_q, other=0.0)
        is_visible = key[:, None] <= row[None, :] + (len_k - len_q)
        keep = None
        if DROPOUT:
            position, sample = coordinates(ids_ptr, positions_ptr, sequence, start_q, row, len_q)
            keep = decisions(dropout, position, sample, first_key, len_k, QUERIES, KEYS, True)
        statistics = (lse[None, :], delta[None, :], share[None, :])
        terms = _score_gradient(
            k, q, v, dout, statistics, is_visible, keep, exponent, DROPOUT, IS_CAUSAL
        )
        dv = dot(terms[1].to(dout.dtype), dout, dv)
        dk = dot(terms[2].to(q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _bwd_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    statistics_ptr,
    dk_ptr,
    dv_ptr,
    tiles_ptr,
    cu_q_ptr,
    cu_k_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_dout,
    head_stride_q,
    head_stride_k,
    head_stride_v,
    head_stride_dout,
    num_queries,
    num_kv_heads,
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
    found = find_tile(tiles_ptr, cu_q_ptr, cu_k_ptr, num_kv_heads)
    sequence, tile, kv_head, start_q, start_k, len_q, len_k = found
    if sequence < 0:
        return
    start_q, start_k, kv_head = start_q.to(tl.int64), start_k.to(tl.int64), kv_head.to(tl.int64)
    first_key = tile * KEYS
    order = key_order(KEYS, True)
    if key_positions_ptr is not None:
        key_positions_ptr += start_k
    k_ptr += start_k * stride_k + kv_head * head_stride_k
    v_ptr += start_k * stride_v + kv_head * head_stride_v
    k = load_tile(k_ptr, first_key, order, len_k, stride_k, WIDTH, E, True)
    v = load_tile(v_ptr, first_key, order, len_k, stride_v, WIDTH, E, True)
    dk = tl.zeros((KEYS, E), tl.float32)
    dv = tl.zeros((KEYS, E), tl.float32)
    # a second loop without the causal mask would take 34 registers more
    begin = 0
    if IS_CAUSAL:
        begin = tl.maximum(first_key + len_q - len_k, 0) // QUERIES * QUERIES
    lengths, exponent = (len_q, len_k), scale * LOG2E
    for i in range(0, group):
        head = kv_head * group + i
        dropout = (key_positions_ptr, 1 + first_head + head.to(tl.int32), k0, k1, threshold)
        dk, dv = _walk_queries(
            dk,
            dv,
            k,
            v,
            first_key,
            q_ptr + start_q * stride_q + head * head_stride_q,
            dout_ptr + start_q * stride_dout + head * head_stride_dout,
            statistics_ptr + head * num_queries + start_q,
            num_kv_heads * group * num_queries,
            ids_ptr,
            positions_ptr,
            sequence,
            start_q,
            stride_q,
            stride_dout,
            begin,
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
        )
    at = (start_k * num_kv_heads + kv_head) * WIDTH
    stride = num_kv_heads * WIDTH
    store_tile(dk_ptr + at, dk * (scale * keep_scale), first_key, order, len_k, stride, WIDTH, E)
    store_tile(dv_ptr + at, dv * keep_scale, first_key, order, len_k, stride, WIDTH, E)


def launch_bwd_q(
    tensors: tuple[Tensor, ...],  # q, k, v, dout, out, lse, statistics, dq
    tiles: Tensor,
    blocks: Blocks,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
    *where: Any,
) -> None:
    """Writes statistics and dq for the queries of these tiles."""
    q, k, v, dout, out, *_ = tensors
    heads = q.shape[1]
    with torch.cuda.device_of(q):
        _bwd_q_kernel[(tiles.shape[0] * heads,)](
            *tensors,
            tiles,
            cu_seqlens_q,
            cu_seqlens_k,
            *head_strides(q, k, v, dout, out),
            q.shape[0],
            heads,
            heads // k.shape[1],
            *kernel_arguments(scale, *where),
            **kernel_options(q, blocks, causal, where[0]),
        )


def launch_bwd_kv(
    tensors: tuple[Tensor, ...],  # q, k, v, dout, statistics, dk, dv
    tiles: Tensor,
    blocks: Blocks,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
    *where: Any,
) -> None:
    """Writes dk and dv for the keys of these tiles."""
    q, k, v, dout, *_ = tensors
    kv_heads = k.shape[1]
    with torch.cuda.device_of(q):
        _bwd_kv_kernel[(tiles.shape[0] * kv_heads,)](
            *tensors,
            tiles,
            cu_seqlens_q,
            cu_seqlens_k,
            *head_strides(q, k, v, dout),
            q.shape[0],
            kv_heads,
            q.shape[1] // kv_heads,
            *kernel_arguments(scale, *where),
            **kernel_options(q, blocks, causal, where[0]),
        )


def new_statistics(q: Tensor) -> Tensor:
    """What the kernel of dq leaves to that of dk and dv."""
    rows = 3 if q.dtype == torch.float32 else 2
    return q.new_empty(rows, q.shape[1], q.shape[0], dtype=torch.float32)


def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
    *where: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    statistics = new_statistics(q)
    cu_seqlens = cu_seqlens_q, cu_seqlens_k
    if q.numel():
        blocks = blocks_of(BLOCKS_Q, q)
        tiles = schedule(*cu_seqlens, q.shape[0], blocks.queries, causal, False)
        tensors: tuple[Tensor, ...] = (q, k, v, dout, out, lse, statistics, dq)
        launch_bwd_q(tensors, tiles, blocks, *cu_seqlens, causal, scale, *where)
    if k.numel():
        blocks = blocks_of(BLOCKS_K, k)
        tiles = schedule(*cu_seqlens[::-1], k.shape[0], blocks.keys, causal, True)
        tensors = (q, k, v, dout, statistics, dk, dv)
        launch_bwd_kv(tensors, tiles, blocks, *cu_seqlens, causal, scale, *where)
    return dq, dk, dv
