"""The Triton kernels of attention against plain PyTorch, with lengths and masks of all kinds."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from taut.ops import Dropout
from taut.ops.attention import attention_reference
from taut.ops.random import NO_DROPOUT, attention_arguments
from taut.ops.triton import attention as kernels
from taut.ops.triton import attention_bwd as backward_kernels
from taut.ops.triton.attention import Blocks
from taut.testing import assert_accurate
from tests.ops.triton.setting import DEVICE, DTYPES, randn, without_grad

fwd = without_grad(kernels.attention_fwd)
bwd = without_grad(backward_kernels.attention_bwd)

# lengths of queries, and of keys where they are others; heads, heads of keys, width
CASES = {
    "self": ([1, 7, 64, 0, 33], None, 2, 2, 16),
    "cross": ([5, 0, 40, 9], [3, 4, 0, 150], 1, 1, 33),
    "groups of heads": ([70, 9], [140, 3], 4, 2, 64),
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
    factor = 3 if q.dtype == torch.float32 else 2  # why 3: see tests/ops/catalogue.py
    assert_accurate(without_grad(ours), without_grad(both_passes(plain)), tensors, factor=factor)


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


def kept_by_forward(heads, first_head, dropout, cu_seqlens, width):
    """Equal weights on values that are the rows of an identity: out is the mask, scaled."""
    q = torch.zeros(int(cu_seqlens[0][-1]), heads, width, device=DEVICE)
    k = torch.zeros(int(cu_seqlens[1][-1]), 1, width, device=DEVICE)
    v = torch.eye(len(k), width, device=DEVICE)[:, None]
    where = attention_arguments("attention", dropout, q, k)
    out, lse = fwd(q, k, v, *cu_seqlens, False, 1.0, *where)
    # dq of head h is the sum over keys of ds k: with k = v and dout = a row of ones ...
    return out, (q, k, v, out, lse, where)
