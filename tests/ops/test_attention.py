"""Attention: what its layout, its cuts and its lengths must not change."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taut import PackedBatch
from taut.ops import Dropout, attention, native
from taut.ops.attention import attention_reference
from taut.ops.random import keep_heads, keep_scale
from taut.testing import assert_accurate, saved_tensors
from tests.ops.samples import torch_samples

RAGGED = [1, 7, 64, 0, 33]
FACTOR_32 = 3  # against probabilities that are kept: see catalogue.py
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def randn(*shape, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def make_inputs(lengths_q, lengths_k=None, heads=2, kv_heads=2, width=16, dtype=torch.float32):
    """q, k, v and the offsets of both."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    q = randn(sum(lengths_q), heads, width, dtype=dtype)
    k, v = randn(2, sum(lengths_k), kv_heads, width, dtype=dtype, seed=1)
    return (q, k, v), (offsets(lengths_q), offsets(lengths_k))


def outputs_and_gradients(inputs, cu_seqlens, dout=None, **kwargs):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves, *cu_seqlens, **kwargs)
    dout = randn(*out.shape, dtype=out.dtype, seed=2) if dout is None else dout
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_same_bits(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def check(lengths_q, lengths_k, heads, kv_heads, width, dtype, **kwargs):
    inputs, (cu_q, cu_k) = make_inputs(lengths_q, lengths_k, heads, kv_heads, width, dtype)

    def packed(form):
        return lambda q, k, v, **kwargs: form(q, k, v, cu_q, cu_k, **kwargs)

    factor = FACTOR_32 if dtype == torch.float32 else 2
    assert_accurate(packed(attention), packed(attention_reference), inputs, factor=factor, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [
        (RAGGED, RAGGED),
        ([30, 12, 0, 5], [12, 30, 5, 0]),  # keys without queries, queries that see no key
        ([700, 40], [700, 40]),  # past the keys that are packed at a time, and a task's queries
        ([70, 600], [1100, 130]),
    ],
    ids=str,
)
def test_lengths_of_all_kinds(lengths_q, lengths_k, causal, p, dtype):
    dropout = Dropout(p, seed=3, step=4, site=5)
    check(lengths_q, lengths_k, 4, 2, 24, dtype, causal=causal, dropout=dropout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 2, 31, 64, 80, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (3, 1)])
def test_heads_of_all_widths(heads, kv_heads, width, dtype):
    check([70, 3, 20], None, heads, kv_heads, width, dtype, causal=True)


LENGTHS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=6)


# plain PyTorch, a sequence at a time, is slow and simple: a tenth of them there
EXAMPLES = 1000 if native.takes(torch.empty(1)) else 100


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(lengths=LENGTHS, groups=st.integers(1, 3), width=st.integers(2, 40), data=st.data())
def test_a_thousand_sets_of_lengths(lengths, groups, width, data):
    lengths_q, lengths_k = zip(*lengths, strict=True)
    causal, p = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 0.2]))
    lengths_k = lengths_q if data.draw(st.booleans()) else lengths_k
    inputs, cu_seqlens = make_inputs(lengths_q, lengths_k, 2 * groups, 2, width)
    kwargs = {"causal": causal, "dropout": Dropout(p, 1)}
    got = outputs_and_gradients(inputs, cu_seqlens, **kwargs)
    wide = [x.double().requires_grad_() for x in inputs]
    out = attention_reference(*wide, *cu_seqlens, **kwargs)
    want = [out, *torch.autograd.grad(out, wide, randn(*out.shape, seed=2).double())]
    for a, b in zip(got, want, strict=True):
        # rounding of fp32 in sums of at most 90 terms; the errors of PyTorch are of this size
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_equals_one_by_one(dtype):
    inputs, cu_seqlens = make_inputs(RAGGED, dtype=dtype)
    packed = outputs_and_gradients(inputs, cu_seqlens, dropout=Dropout(0.2, 1))
    dout = randn(*packed[0].shape, dtype=dtype, seed=2)
    for i, (start, length) in enumerate(zip(cu_seqlens[0].tolist(), RAGGED, strict=False)):
        rows = slice(start, start + length)
        dropout = Dropout(0.2, 1, sample_ids=torch.full((length,), i))
        alone = [offsets([length])] * 2
        got = outputs_and_gradients([x[rows] for x in inputs], alone, dout[rows], dropout=dropout)
        assert_same_bits(got, [x[rows] for x in packed])


@pytest.mark.parametrize("causal", [False, True])
def test_a_changed_sequence_moves_no_other_by_a_bit(causal):
    lengths = [40, 130, 7, 600]
    (q, k, v), cu_seqlens = make_inputs(lengths)
    before = outputs_and_gradients((q, k, v), cu_seqlens, causal=causal, dropout=Dropout(0.1, 1))
    changed = slice(*cu_seqlens[0][1:3].tolist())
    for x in (q, k, v):
        x[changed] = torch.nan
    after = outputs_and_gradients((q, k, v), cu_seqlens, causal=causal, dropout=Dropout(0.1, 1))
    for a, b in zip(after, before, strict=True):
        assert a[changed].isnan().all()
        kept = torch.ones(len(a), dtype=torch.bool)
        kept[changed] = False
        assert_same_bits(a[kept], b[kept])


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_query_sees_nothing_past_its_place(causal):
    """The last query stands at the last key."""
    (q, k, v), cu_seqlens = make_inputs([5], [90])
    want = attention(q, k, v, *cu_seqlens, causal=causal)
    k[87], v[87] = 1e3, 1e30
    got = attention(q, k, v, *cu_seqlens, causal=causal)
    blind = 2 if causal else 0  # queries 0 and 1 stand at keys 85 and 86
    torch.testing.assert_close(got[:blind], want[:blind])
    assert not (got[blind:] == want[blind:]).any()


def masks(heads, num_queries, num_keys, **where):
    """What attention drops, seen through values that are unit vectors: (heads, queries, keys)."""
    q, k = torch.zeros(num_queries, heads, num_keys), torch.zeros(num_keys, heads, num_keys)
    v = torch.eye(num_keys)[:, None].expand(k.shape)
    out = attention(q, k, v, offsets([num_queries]), offsets([num_keys]), dropout=Dropout(**where))
    weights = out.transpose(0, 1) * num_keys
    scale = torch.tensor(keep_scale(where["p"]))
    torch.testing.assert_close(weights[weights != 0], scale.expand(weights[weights != 0].shape))
    return weights != 0


@pytest.mark.parametrize("num_keys", [5, 130, 700])
def test_drops_as_the_generator_says(num_keys):
    where = {"p": 0.3, "seed": 2**60 + 1, "step": 7, "site": 2**31 + 9}
    count, zeros = torch.arange(num_keys), torch.zeros(6, dtype=torch.int64)
    want = keep_heads(3, 0, zeros, torch.arange(6), count, *where.values())
    assert torch.equal(masks(3, 6, num_keys, **where), want)
    ids, positions = torch.randint(2**32, (2, 6))
    for keys in (count + 50, count.flip(0), torch.randperm(2000)[:num_keys]):
        want = keep_heads(3, 11, ids, positions, keys, *where.values())
        got = masks(
            3,
            6,
            num_keys,
            **where,
            sample_ids=ids,
            positions=positions,
            key_positions=keys,
            first_head=11,
        )
        assert torch.equal(got, want)


def test_numbers_in_a_batch_are_the_default_coordinates():
    batch = PackedBatch.from_sequences([[0] * n for n in RAGGED], sample_ids=range(5))
    inputs, cu_seqlens = make_inputs(RAGGED)
    positions, ids = batch.positions, batch.token_sample_ids
    named = Dropout(0.2, 1, sample_ids=ids, positions=positions, key_positions=positions)
    want = outputs_and_gradients(inputs, cu_seqlens, dropout=Dropout(0.2, 1))
    assert_same_bits(outputs_and_gradients(inputs, cu_seqlens, dropout=named), want)


class TestCuts:
    """A part of a call draws what the whole draws."""

    LENGTHS = (600, 40, 171)
    DROPOUT = Dropout(0.2, seed=9, step=1)

    def whole(self):
        (q, k, v), cu_seqlens = make_inputs(self.LENGTHS, heads=4, kv_heads=2, width=32)
        dout = randn(*q.shape, seed=2)
        out = outputs_and_gradients((q, k, v), cu_seqlens, dout, dropout=self.DROPOUT)
        return (q, k, v), cu_seqlens, dout, out

    @staticmethod
    def coordinates(cu_seqlens):
        """Sequence and number in it of each token."""
        lengths = cu_seqlens.diff().long()
        ids = torch.arange(len(lengths)).repeat_interleave(lengths)
        return ids, torch.arange(int(cu_seqlens[-1])) - cu_seqlens[ids]

    def test_query_blocks(self):
        (q, k, v), cu_seqlens, dout, (out, dq, dk, dv) = self.whole()
        ids, positions = self.coordinates(cu_seqlens[0])
        total_dk, total_dv = torch.zeros_like(k), torch.zeros_like(v)
        for start, end in ((0, 130), (130, 137), (137, 171)):  # of every sequence
            rows = (start <= positions) & (positions < end)
            cu_q = offsets([int(rows[ids == i].sum()) for i in range(3)])
            where = Dropout(0.2, 9, 1, sample_ids=ids[rows], positions=positions[rows])
            got = outputs_and_gradients(
                (q[rows], k, v), (cu_q, cu_seqlens[1]), dout[rows], dropout=where
            )
            torch.testing.assert_close(got[0], out[rows])
            torch.testing.assert_close(got[1], dq[rows])
            total_dk, total_dv = total_dk + got[2], total_dv + got[3]
        rows = positions >= 171
        where = Dropout(0.2, 9, 1, sample_ids=ids[rows], positions=positions[rows])
        cu_q = offsets([429, 0, 0])
        got = outputs_and_gradients(
            (q[rows], k, v), (cu_q, cu_seqlens[1]), dout[rows], dropout=where
        )
        torch.testing.assert_close(got[0], out[rows])
        torch.testing.assert_close(total_dk + got[2], dk)
        torch.testing.assert_close(total_dv + got[3], dv)

    def test_head_groups(self):
        (q, k, v), cu_seqlens, dout, want = self.whole()
        for group in (0, 1):
            heads, kv_heads = slice(2 * group, 2 * group + 2), slice(group, group + 1)
            got = outputs_and_gradients(
                (q[:, heads], k[:, kv_heads], v[:, kv_heads]),
                cu_seqlens,
                dout[:, heads],
                dropout=Dropout(0.2, 9, 1, first_head=2 * group),
            )
            parts = [heads, heads, kv_heads, kv_heads]
            assert_same_bits(got, [x[:, part] for x, part in zip(want, parts, strict=True)])

    def test_keys_gathered_in_another_order(self):
        (q, k, v), cu_seqlens, dout, want = self.whole()
        _, positions = self.coordinates(cu_seqlens[1])
        starts = cu_seqlens[1][:-1].tolist()
        order = torch.cat(
            [torch.randperm(n) + s for n, s in zip(self.LENGTHS, starts, strict=True)]
        )
        where = Dropout(0.2, 9, 1, key_positions=positions[order])
        got = outputs_and_gradients((q, k[order], v[order]), cu_seqlens, dout, dropout=where)
        for a, b in zip(got, [*want[:2], *(x[order] for x in want[2:])], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.native
def test_250_runs_give_the_same_bits():
    inputs, cu_seqlens = make_inputs([600, 130, 0, 7], kv_heads=1, dtype=torch.bfloat16)
    kwargs = {"causal": True, "dropout": Dropout(0.1, 1)}
    want = outputs_and_gradients(inputs, cu_seqlens, **kwargs)
    for _ in range(250):
        assert_same_bits(outputs_and_gradients(inputs, cu_seqlens, **kwargs), want)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 3.0])
def test_any_scale(scale):
    lengths = [90, 5]
    (q, k, v), cu_seqlens = make_inputs(lengths)
    k = k * 16  # a base at the wrong end would overflow
    got = outputs_and_gradients((q, k, v), cu_seqlens, scale=scale)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out = attention_reference(*wide, *cu_seqlens, scale=scale)
    grads = torch.autograd.grad(out, wide, randn(*out.shape, seed=2).double())
    torch.testing.assert_close(got[0].double(), out, rtol=1e-4, atol=1e-4)
    for a, b in zip(got[1:], grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_do_not_overflow(dtype):
    """Scores around 1e4: one key takes all the weight."""
    lengths = [130, 5]
    (q, k, v), cu_seqlens = make_inputs(lengths, dtype=dtype)
    got = outputs_and_gradients((q * 64, k * 64, v), cu_seqlens, scale=1.0)
    assert all(x.isfinite().all() for x in got)
    wide = [x.double() for x in (q * 64, k * 64, v)]
    want = attention_reference(*wide, *cu_seqlens, scale=1.0)
    best = (wide[0][0] * wide[1][:130]).sum(-1).argmax(0)
    picked = torch.stack([v[best[h], h] for h in range(2)])
    assert want[0].sub(picked).abs().max() < 0.5  # else the scores are not large
    torch.testing.assert_close(got[0].double(), want, rtol=2e-2, atol=2e-2)


def test_keeps_its_inputs_the_output_and_four_bytes_a_query():
    (q, k, v), cu_seqlens = make_inputs([64, 30], heads=4, width=32, dtype=torch.bfloat16)
    kept = saved_tensors(attention, q, k, v, *cu_seqlens, causal=True, dropout=Dropout(0.1, 1))
    sizes = sorted(x.num_bytes for x in kept)
    both = k.nbytes + v.nbytes  # views of one storage
    assert sizes == sorted([12, 12, 94 * 4 * 4, q.nbytes, q.nbytes, both])


def test_one_projection_of_q_k_and_v_goes_in_as_it_lies():
    qkv = randn(50, 3, 4, 16).requires_grad_()
    cu_seqlens = offsets([20, 30])
    q, k, v = qkv.unbind(1)
    out = attention(q, k, v, cu_seqlens)
    torch.testing.assert_close(out, attention(*(x.contiguous() for x in (q, k, v)), cu_seqlens))
    kept = saved_tensors(lambda x: attention(*x.unbind(1), cu_seqlens), qkv)
    assert sum(x.num_bytes == qkv.nbytes for x in kept) == 1  # one storage, no copies
    assert sum(x.num_bytes == qkv.nbytes // 3 for x in kept) == 1  # the output


def attend_padded(q, k, v, *, causal):
    """As torch has it: (..., S, E), and causal queries aligned to the first keys."""
    batch = k.shape[:-2]
    q = q.expand(*batch, *q.shape[-2:])
    k, v = (x[..., : q.shape[-2], :] if causal else x for x in (k, v))
    packed = [x.reshape(-1, 1, x.shape[-1]) for x in (q, k, v)]
    cu_seqlens = [offsets([x.shape[-2]] * batch.numel()) for x in (q, k)]
    return attention(*packed, *cu_seqlens, causal=causal).view(q.shape)


def test_torch_s_own_samples():
    """Every sample of scaled_dot_product_attention without mask and dropout."""
    count = 0
    for sample in torch_samples("nn.functional.scaled_dot_product_attention"):
        inputs, kwargs = [sample.input, *sample.args], sample.kwargs
        if "attn_mask" in kwargs or kwargs["dropout_p"] > 0:
            continue
        plain = torch.nn.functional.scaled_dot_product_attention
        assert_accurate(
            partial(attend_padded, causal=kwargs["is_causal"]),
            partial(plain, is_causal=kwargs["is_causal"]),
            [
                x.detach() / 8 for x in inputs
            ],  # as they are, scores reach 200 and weights are 0 or 1
            factor=FACTOR_32,
        )
        count += 1
    assert count == 12
