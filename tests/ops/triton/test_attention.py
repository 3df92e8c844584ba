"""The Triton kernels of attention against plain PyTorch, with lengths and masks of all kinds."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench_attention_grouped import Grouped
from taut.ops import Dropout
from taut.ops.attention import attention_reference
from taut.ops.random import NO_DROPOUT, attention_arguments, keep_heads
from taut.ops.triton import attention as kernels
from taut.ops.triton import attention_bwd as backward_kernels
from taut.ops.triton.attention import Blocks, schedule
from taut.testing import assert_accurate
from tests.ops.triton.setting import DEVICE, DTYPES, randn, without_grad

fwd = without_grad(kernels.attention_fwd)
bwd = without_grad(backward_kernels.attention_bwd)

# lengths of queries, and of keys where they are others; heads, heads of keys, width
CASES = {
    "self": ([1, 7, 64, 0, 33], None, 2, 2, 16),
    "cross": ([5, 0, 40, 9], [3, 4, 0, 150], 1, 1, 33),
    "groups of heads": ([70, 9], [140, 3], 2, 1, 64),
    "wide": ([50], [40], 1, 1, 80),
    "wider": ([17, 3], None, 1, 1, 130),
}
NOWHERE: tuple[Any, ...] = (*NO_DROPOUT, None, 0)


@pytest.fixture(autouse=True)
def _few_steps_in_the_interpreter(monkeypatch):
    if DEVICE == "cpu":
        set_blocks(monkeypatch, 64, 128)


def set_blocks(monkeypatch, queries, keys):
    for owner, name in (
        (kernels, "BLOCKS"),
        (backward_kernels, "BLOCKS_Q"),
        (backward_kernels, "BLOCKS_K"),
    ):
        blocks = Blocks(queries, keys, 4, 1)
        table = {key: dict.fromkeys(kernels.EVERYWHERE, blocks) for key in getattr(owner, name)}
        monkeypatch.setattr(owner, name, table)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


def inputs_of(case, dtype=torch.float32):
    """q, k, v, dout, and both offsets."""
    lengths, key_lengths, heads, kv_heads, width = CASES[case]
    key_lengths = key_lengths or lengths
    rows, keys = sum(lengths), sum(key_lengths)
    shapes = [(rows, heads, width), (keys, kv_heads, width), (keys, kv_heads, width)]
    tensors = [randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([*shapes, shapes[0]])]
    return tensors, (offsets(lengths), offsets(key_lengths))


def dropout_of(case, p, with_ids=True):
    """Large ids in no order, and keys in another one, as where a part of the whole is seen."""
    if p == 0.0:
        return None
    if not with_ids:
        return Dropout(p, 5, 6, 7)
    lengths, key_lengths, *_ = CASES[case]
    gen = torch.Generator().manual_seed(1)
    rows, keys = sum(lengths), sum(key_lengths or lengths)
    ids, positions = torch.randint(2**32, (2, rows), generator=gen).to(DEVICE)
    key_positions = torch.randint(1000, (keys,), generator=gen).to(DEVICE)
    return Dropout(p, 2**62 + 7, 3, 2**31 + 5, ids, positions, key_positions, 9)


def both_passes(form):
    """(q, k, v, dout) -> out, dq, dk, dv, by autograd."""

    def run(q, k, v, dout):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = form(*leaves)
            grads = torch.autograd.grad(out, leaves, dout)
        return out.detach(), *grads

    return run


def by_kernels(cu_seqlens, causal, scale, where):
    def run(q, k, v, dout) -> tuple[Tensor, ...]:
        arguments = (*cu_seqlens, causal, scale, *where)
        out, lse = fwd(q, k, v, *arguments)
        return out, *bwd(dout, q, k, v, out, lse, *arguments)

    return run


def check(tensors, cu_seqlens, causal=False, dropout=None, scale=None):
    q, k, *_ = tensors

    def plain(q, k, v):
        return attention_reference(
            q, k, v, *cu_seqlens, causal=causal, scale=scale, dropout=dropout
        )

    where = attention_arguments("attention", dropout, q, k)
    scale_of_kernels = q.shape[-1] ** -0.5 if scale is None else scale
    ours = by_kernels(cu_seqlens, causal, scale_of_kernels, where)
    # why 3: see tests/ops/catalogue.py; a causal query that sees few keys shows it in 16-bit, too
    assert_accurate(without_grad(ours), without_grad(both_passes(plain)), tensors, factor=3)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES)
def test_matches_plain_pytorch(case, causal, p):
    check(*inputs_of(case), causal, dropout_of(case, p, with_ids=False))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", ["self", "groups of heads"])
def test_halves_match_plain_pytorch(case, dtype):
    check(*inputs_of(case, dtype), True, dropout_of(case, 0.1, with_ids=False))
    check(*inputs_of(case, dtype))


@pytest.mark.parametrize("case", ["cross", "groups of heads"])
def test_ids_and_positions_of_queries_and_keys_are_those_given(case):
    check(*inputs_of(case), True, dropout_of(case, 0.3))


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_any_scale(scale):
    check(*inputs_of("self"), True, scale=scale)


def test_views_of_one_projection():
    lengths = [20, 50]
    qkv = randn(70, 3, 2, 16)
    q, k, v = qkv.unbind(1)
    dout = randn(2, 70, 16, seed=3).transpose(0, 1)
    assert not any(x.is_contiguous() for x in (q, k, v, dout))
    arguments = (offsets(lengths), offsets(lengths)), True, 0.25, NOWHERE
    got = by_kernels(*arguments)(q, k, v, dout)
    want = by_kernels(*arguments)(*(x.contiguous() for x in (q, k, v, dout)))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_log_sum_exp_is_of_powers_of_two_and_infinite_without_keys():
    (q, k, v, _), cu_seqlens = inputs_of("cross")
    _, lse = fwd(q, k, v, *cu_seqlens, False, 0.5, *NOWHERE)
    want = torch.cat([0.5 * q[:5, 0] @ k[:3, 0].T, q[:0, 0] @ k[:3, 0].T]).logsumexp(1)
    torch.testing.assert_close(lse[:5, 0] * math.log(2), want)
    assert (lse[5:45] == -torch.inf).all()
    _, lse = fwd(q, k, v, *cu_seqlens, True, 0.5, *NOWHERE)  # the first sees none, the third one
    assert (lse[:2] == -torch.inf).all()
    torch.testing.assert_close(lse[2, 0] * math.log(2), 0.5 * q[2, 0] @ k[0, 0])


QUERIES, KEYS, MASK_HEADS, MASK_WIDTH = [3, 18], [20, 140], 2, 256


def masks_of_kernels(dropout, dtype):
    """What each kernel keeps, (heads, queries, keys) a sequence, where all weights are equal."""
    cu_seqlens = offsets(QUERIES), offsets(KEYS)
    ones = torch.ones(1, MASK_HEADS, 1, dtype=dtype, device=DEVICE)
    one_per_query, one_per_key = (
        torch.cat([torch.eye(n, MASK_WIDTH, dtype=dtype, device=DEVICE) for n in lengths])
        for lengths in (QUERIES, KEYS)
    )
    one_per_query, one_per_key = (x[:, None] * ones for x in (one_per_query, one_per_key))
    q, v = torch.zeros_like(one_per_query), torch.ones_like(one_per_key)
    where = attention_arguments("attention", dropout, q, v)
    arguments = (*cu_seqlens, False, 1.0, *where)
    out, _ = fwd(q, one_per_key, one_per_key, *arguments)
    _, _, dv = bwd(
        one_per_query, q, one_per_key, v, *fwd(q, one_per_key, v, *arguments), *arguments
    )
    forward = [x.transpose(0, 1) != 0 for x in out.split(QUERIES)]
    of_kv = [x.permute(1, 2, 0) != 0 for x in dv.split(KEYS)]
    # dp is the same for all: ds is positive where it is kept
    dout = torch.ones_like(q)
    dq, *_ = bwd(dout, q, one_per_key, v, *fwd(q, one_per_key, v, *arguments), *arguments)
    of_q = [x.transpose(0, 1) > 0 for x in dq.split(QUERIES)]
    for (n, m), *three in zip(zip(QUERIES, KEYS, strict=True), forward, of_q, of_kv, strict=True):
        yield [three[0][..., :m], three[1][..., :m], three[2][:, :n]]


@pytest.mark.parametrize(
    ("keys", "dtype"), [(32, torch.bfloat16), (64, torch.bfloat16), (128, torch.float32)]
)
def test_masks_are_those_of_keep_heads(keys, dtype, monkeypatch):
    if DEVICE == "cpu":
        set_blocks(monkeypatch, 16, keys)
    gen = torch.Generator().manual_seed(2)
    shuffled = torch.cat([torch.randperm(n, generator=gen) + 100 for n in KEYS]).to(DEVICE)
    ids, positions = torch.randint(2**32, (2, sum(QUERIES)), generator=gen).to(DEVICE)
    given = Dropout(0.4, 3, 4, 5, ids, positions, shuffled, 11)
    for dropout in (Dropout(0.4, 3, 4, 5), given):
        rows = keys_before = 0
        masks = masks_of_kernels(dropout, dtype)
        for i, (n, m, kernels_kept) in enumerate(zip(QUERIES, KEYS, masks, strict=True)):
            coordinates = (torch.full((n,), i), torch.arange(n), torch.arange(m))
            if dropout is given:
                of_rows, of_keys = slice(rows, rows + n), slice(keys_before, keys_before + m)
                coordinates = (ids[of_rows], positions[of_rows], shuffled[of_keys])
            want = keep_heads(
                MASK_HEADS, dropout.first_head, *(x.to(DEVICE) for x in coordinates), 0.4, 3, 4, 5
            )
            assert all(torch.equal(kept, want) for kept in kernels_kept)
            rows, keys_before = rows + n, keys_before + m


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_tiles_come_longest_first_and_each_once(causal, of_keys):
    gen = torch.Generator().manual_seed(3)
    lengths = torch.randint(200, (2, 70), generator=gen)
    lengths[0, ::9], lengths[1, ::7] = 0, 0
    a, b = lengths.tolist()
    block, tokens = 16, sum(a)
    tiles = schedule(offsets(a), offsets(b), tokens, block, causal, of_keys).tolist()
    assert len(tiles) == tokens // block + len(a)
    used = [tile for tile in tiles if tile[0] >= 0]
    assert tiles[: len(used)] == used
    assert sorted(used) == [[i, t] for i, n in enumerate(a) for t in range(-(-n // block))]

    def cost(sequence, tile):
        first, len_a, len_b = tile * block, a[sequence], b[sequence]
        if causal:
            return max(0, min(len_b, len_a - first if of_keys else first + 1 + len_b - len_a))
        return len_b

    costs = [cost(*tile) for tile in used]
    assert costs == sorted(costs, reverse=True)


def test_repeats_have_the_same_bits():
    tensors, cu_seqlens = inputs_of("cross", torch.bfloat16)
    where = attention_arguments("attention", Dropout(0.2, 1), *tensors[:2])
    first, second = (by_kernels(cu_seqlens, True, 0.125, where)(*tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_sequences_do_not_see_each_other():
    """NaN in one of them reaches no other, nor what lies behind the last one."""
    tensors, cu_seqlens = inputs_of("self")
    arguments = cu_seqlens, True, 0.25, NOWHERE
    want = by_kernels(*arguments)(*tensors)
    rows = slice(8, 72)
    for x in tensors:
        x[rows] = torch.nan
    for got, expected in zip(by_kernels(*arguments)(*tensors), want, strict=True):
        assert got[rows].isnan().all()
        assert torch.equal(got[:8], expected[:8])
        assert torch.equal(got[72:], expected[72:])


def test_no_rows_on_either_side():
    q, k, v = randn(0, 2, 8), randn(3, 1, 8), randn(3, 1, 8)
    arguments = (offsets([0]), offsets([3])), False, 1.0, NOWHERE
    out, dq, dk, dv = by_kernels(*arguments)(q, k, v, q)
    assert out.shape == dq.shape == q.shape
    assert not dk.any()
    assert not dv.any()
    arguments = (offsets([3]), offsets([0])), True, 1.0, NOWHERE
    out, dq, dk, dv = by_kernels(*arguments)(k, q[:, :1], q[:, :1], k)
    assert dk.shape == dv.shape == (0, 1, 8)
    assert not out.any()
    assert not dq.any()


def test_groups_by_length_give_what_one_launch_gives(monkeypatch):
    lengths = [130, 3, 300, 128, 40]
    tables = [[(64, 64, 4, 1)] * 5] * 3
    set_blocks(monkeypatch, 64, 64)
    q, k, v = randn(sum(lengths), 3, 1, 16, dtype=torch.bfloat16).unbind(1)
    dout = randn(sum(lengths), 1, 16, dtype=torch.bfloat16, seed=1)
    where = attention_arguments("attention", Dropout(0.1, 1), q, k)
    grouped = Grouped(lengths, DEVICE, tables)
    assert [len(group[1][0]) for group in grouped.groups] == [4, 3, 5]
    got = without_grad(grouped)(q, k, v, dout, 0.25, *where)
    want = by_kernels(grouped.cu_seqlens, False, 0.25, where)(q, k, v, dout)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
