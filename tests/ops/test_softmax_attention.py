"""softmax_attention: attention that gives its probabilities and keeps them and v alone."""

import math
import sys
from functools import partial

import pytest
import torch

from taut import ops
from taut.ops import native
from taut.ops.attention import attention_reference
from taut.ops.random import NO_DROPOUT, keep_scale
from taut.ops.softmax_attention import (
    _softmax_bwd,
    _softmax_fwd,
    softmax_attention_reference,
)
from taut.testing import assert_accurate, saved_bytes, saved_tensors
from tests.ops.test_native import _build, every_build  # noqa: F401 (a fixture, found by name)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODULE = sys.modules["taut.ops.softmax_attention"]


def randn(*shape, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def make(sequences=2, heads=3, queries=7, keys=33, width=5, dtype=torch.float32):
    scores = randn(sequences, heads, queries, keys, dtype=dtype)
    return scores, randn(sequences, heads, keys, width, dtype=dtype, seed=1)


def results(fn, scores, v, **options):
    """Both outputs and both gradients, of everything that comes out."""
    scores, v = (x.detach().clone().requires_grad_() for x in (scores, v))
    outputs = fn(scores, v, **options)
    dys = [randn(*y.shape, dtype=y.dtype, seed=2 + i) for i, y in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, (scores, v), dys)]


def assert_equal(got, want):
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("keys", [1, 33, 1025, 5000])
def test_any_number_of_keys(keys, p, dtype):
    scores, v = make(2, 2, 16, keys, 8, dtype)
    dropout = ops.Dropout(p, 5)
    assert_accurate(
        ops.softmax_attention, softmax_attention_reference, (scores, v), dropout=dropout
    )


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("empty", ["sequences", "heads", "queries", "keys", "width"])
def test_nothing_at_all(empty, p):
    scores, v = make(**{empty: 0})
    dropout = ops.Dropout(p, 5)
    assert_accurate(
        ops.softmax_attention, softmax_attention_reference, (scores, v), dropout=dropout
    )
    if empty == "keys":
        assert not ops.softmax_attention(scores, v, dropout=dropout)[0].any()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 3)], ids=str)
def test_any_leading_dimensions(shape):
    scores, v = randn(*shape, 7, 33), randn(*shape, 33, 5, seed=1)
    dropout = ops.Dropout(0.3, 5)
    out, p = ops.softmax_attention(scores, v, dropout=dropout)
    assert (out.shape, p.shape) == ((*shape, 7, 5), (*shape, 7, 33))
    flat = [x.reshape(-1, shape[-1], *x.shape[-2:]) for x in (scores, v)]
    flat_out, flat_p = ops.softmax_attention(*flat, dropout=dropout)
    assert_equal([flat_out.view_as(out), flat_p.view_as(p)], [out, p])
    assert_accurate(
        ops.softmax_attention, softmax_attention_reference, (scores, v), dropout=dropout
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_query_that_sees_no_key_gives_zeros(p, dtype):
    scores, v = make(dtype=dtype)
    scores[1, 2] = -math.inf
    scores[0, :, 3] = -math.inf
    scores[0, :, 4, 1:] = -math.inf
    dropout = ops.Dropout(p, 5)
    for fn in (ops.softmax_attention, softmax_attention_reference):
        out, probabilities, dscores, dv = results(fn, scores, v, dropout=dropout)
        assert not any(x.isnan().any() for x in (out, probabilities, dscores, dv))
        for x in (out, probabilities, dscores):
            assert not x[1, 2].any()
            assert not x[0, :, 3].any()
        assert not dv[1, 2].any()
        assert (probabilities[0, :, 4, 0] == 1).all()
        assert not dscores[scores == -math.inf].any()


def test_hidden_keys_get_exactly_nothing():
    """A probability of 2^-126 times an infinite value would not be zero."""
    scores, v = make(keys=200)
    scores[..., 50:] = -math.inf
    for dropout in (None, ops.Dropout(0.3, 5)):
        _, p = ops.softmax_attention(scores, v, dropout=dropout)
        assert not p[..., 50:].any()
        torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores(sign, dtype):
    scores, v = make(2, 2, 64, dtype=dtype)
    scores = (scores + sign * 30) * 300
    assert_accurate(ops.softmax_attention, softmax_attention_reference, (scores, v))


def test_nan_and_infinity_show():
    scores, v = make()
    scores[0, 0, 0, 5], scores[0, 0, 1, 20], scores[0, 0, 2] = math.nan, math.inf, math.nan
    _, p = ops.softmax_attention(scores, v)
    assert p[0, 0, :3].isnan().all()
    assert not p[0, 0, 3:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("used", [0, 1], ids=["out", "probabilities"])
def test_either_output_may_go_unused(used, dtype):
    scores, v = make(2, 2, 64, dtype=dtype)
    dy = [None, None]
    dy[used] = randn(2, 2, 64, (5, 33)[used], dtype=dtype, seed=3)

    def with_v(form):
        # the probabilities do not need v: to autograd its gradient is none, to the op it is zero
        def run(scores, v, **options):
            out, p = form(scores, v, **options)
            return out, p + 0 * v.sum()

        return run

    fn, reference = (with_v(f) for f in (ops.softmax_attention, softmax_attention_reference))
    assert_accurate(fn, reference, (scores, v), dy, dropout=ops.Dropout(0.3, 5))


def coordinates(sequences, queries, keys):
    gen = torch.Generator().manual_seed(4)
    numbers = torch.randint(2**32, (2, sequences * queries), generator=gen)
    key_positions = torch.cat([torch.randperm(keys, generator=gen) for _ in range(sequences)])
    return {
        "sample_ids": numbers[0],
        "positions": numbers[1],
        "key_positions": key_positions + 1000,
        "first_head": 6,
    }


def packed(x):
    """(sequences, heads, n, width) as `attention` takes it."""
    return x.transpose(1, 2).flatten(0, 1)


def offsets(sequences, length):
    return torch.arange(sequences + 1).int() * length


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("keys", [33, 600])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_attention(dtype, keys, with_ids):
    """The same queries, keys and dropout, with scores made by hand: the same but for rounding."""
    sequences, heads, queries, width = 3, 4, 10, 16
    q, k, v = (
        randn(sequences, heads, n, width, dtype=dtype, seed=i)
        for i, n in enumerate((queries, keys, keys))
    )
    ids = coordinates(sequences, queries, keys) if with_ids else {}
    dropout = ops.Dropout(0.3, seed=2**40 + 1, step=3, site=4, **ids)
    cu_q, cu_k = offsets(sequences, queries), offsets(sequences, keys)

    def by_scores(form, q, k, v):
        scores = q @ k.transpose(-1, -2) * width**-0.5
        return packed(form(scores, v, dropout=dropout)[0])

    def by_attention(form, q, k, v):
        return form(*map(packed, (q, k, v)), cu_q, cu_k, dropout=dropout)

    ours, plain = (
        partial(by_scores, f) for f in (ops.softmax_attention, softmax_attention_reference)
    )
    attention, plain_attention = (
        partial(by_attention, f) for f in (ops.attention, attention_reference)
    )
    assert_accurate(ours, plain_attention, (q, k, v))
    # its output; how accurate its gradients are is asked in its own tests
    no_gradient = torch.zeros(sequences * queries, heads, width, dtype=dtype)
    assert_accurate(attention, plain, (q, k, v), no_gradient)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("keys", [33, 600])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_mask_bits_are_those_of_attention(dtype, keys, with_ids):
    """Equal scores and values of one unit each show every decision, here and there."""
    sequences, heads, queries, width = 2, 3, 5, min(keys, 200)
    ids = coordinates(sequences, queries, keys) if with_ids else {}
    dropout = ops.Dropout(0.4, seed=9, site=1, **ids)
    units = torch.eye(keys, width, dtype=dtype).expand(sequences, heads, keys, width)
    q, k = (torch.zeros(sequences, heads, n, width, dtype=dtype) for n in (queries, keys))
    cu_q, cu_k = offsets(sequences, queries), offsets(sequences, keys)
    by_attention = ops.attention(*map(packed, (q, k, units)), cu_q, cu_k, dropout=dropout)
    want = by_attention.view(sequences, queries, heads, width).transpose(1, 2) != 0
    scores = torch.zeros(sequences, heads, queries, keys, dtype=dtype, requires_grad=True)
    assert (ops.softmax_attention(scores, units, dropout=dropout)[0] != 0).equal(want)
    # a gradient of ones comes back to what was kept, from which its mean is taken
    v = torch.ones(sequences, heads, keys, 1, dtype=dtype, requires_grad=True)
    ops.softmax_attention(scores, v, dropout=dropout)[0].sum().backward()
    assert (scores.grad[..., :width] > 0).equal(want)
    num_kept = (v.grad[..., :width, 0] * keys / keep_scale(0.4)).round()
    assert num_kept.equal(want.sum(2).to(dtype))


def test_eval_is_deterministic_and_drops_nothing():
    scores, v = make()
    want = scores.softmax(-1) @ v
    for _ in range(2):
        out, p = ops.softmax_attention(scores, v)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(p, scores.softmax(-1))
    assert not ops.softmax_attention(scores, v, dropout=ops.Dropout(0.3, 1))[0].equal(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_probabilities_are_those_before_dropout(dtype):
    scores, v = make(dtype=dtype)
    _, want = ops.softmax_attention(scores, v)
    out, p = ops.softmax_attention(scores, v, dropout=ops.Dropout(0.3, 1))
    assert p.equal(want)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))
    assert not out.equal(ops.softmax_attention(scores, v)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_the_probabilities_and_v_alone(dtype):
    scores, v = make(dtype=dtype)
    fn = partial(ops.softmax_attention, dropout=ops.Dropout(0.1, 0))
    assert saved_bytes(fn, scores, v) == scores.nbytes + v.nbytes
    assert [(t.shape, t.dtype) for t in saved_tensors(fn, scores, v)] == [
        (scores.shape, dtype),
        (v.shape, dtype),
    ]
    out, p = fn(scores.requires_grad_(), v)
    assert p.untyped_storage().data_ptr() in {
        t.untyped_storage().data_ptr() for t in out.grad_fn.saved_tensors if t is not None
    }


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("with_ids", [False, True])
def test_chunks_do_not_show(dtype, with_ids, monkeypatch):
    """Seven matrices of two sequences and more than one head: chunks begin anywhere."""
    scores, v = make(3, 4, 20, 70, 5, dtype)
    ids = coordinates(3, 20, 70) if with_ids else {}
    dropout = ops.Dropout(0.3, 5, **ids)
    want = results(ops.softmax_attention, scores, v, dropout=dropout)
    for matrices in (1, 5, 7):
        size = matrices * 20 * 70 * scores.element_size()
        monkeypatch.setattr(MODULE, "CHUNK_BYTES", {"cpu": size, "cuda": size})
        got = results(ops.softmax_attention, scores, v, dropout=dropout)
        torch.testing.assert_close(got, want)
        assert got[1].equal(want[1])
        # PyTorch's products of 16-bit numbers need not have the same bits for other batches
        if dtype == torch.float32 and native.library is not None:
            assert_equal(got, want)


def test_scratch_memory_does_not_grow_with_the_batch(monkeypatch):
    sizes = []
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: sizes.append(x.nbytes) or empty_like(x))
    monkeypatch.setattr(MODULE, "CHUNK_BYTES", {"cpu": 40_000, "cuda": 40_000})
    scores, v = make(8, 4, 20, 70)
    ops.softmax_attention(scores, v, dropout=ops.Dropout(0.3, 5))
    assert sizes == [scores.nbytes, 40_000 // (20 * 70 * 4) * 20 * 70 * 4]


def rows_arguments(shape, p_drop):
    sequences, _, queries, keys = shape
    if p_drop == 0.0:
        return (*NO_DROPOUT, None, 0)
    ids = coordinates(sequences, queries, keys)
    return (p_drop, 7, 3, 5, ids["sample_ids"], ids["positions"], ids["key_positions"], 6)


@every_build
@pytest.mark.parametrize("p_drop", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 16, 77, 300, 1100])
def test_every_build_computes_the_same(keys, dtype, p_drop):
    shape = (2, 3, 5, keys)
    where = rows_arguments(shape, p_drop)
    scores, dp, gradient = (randn(6, 5, keys, dtype=dtype, seed=i) for i in range(3))
    scores[:, 0], scores[:, 1, ::2] = -math.inf, -math.inf

    def forward(form, scores):
        p = torch.empty_like(scores)
        dropped = torch.empty_like(scores) if p_drop else None
        form(scores, p, dropped, 0, 3, *where)
        return p, dropped if p_drop else p

    def backward(form, p, dp, gradient):
        ds, dropped = gradient.clone(), torch.empty_like(p) if p_drop else None
        form(p, dp, ds, dropped, 0, 3, *where)
        return ds, dropped if p_drop else ds

    got = forward(native.softmax_fwd, scores)
    want = forward(_softmax_fwd, scores.double())
    got += backward(native.softmax_bwd, got[0], dp, gradient)
    want += backward(_softmax_bwd, *(x.double() for x in (got[0], dp, gradient)))
    for a, b in zip(got, want, strict=True):
        ulp = torch.finfo(dtype).eps * max(1, b.abs().max().item())
        torch.testing.assert_close(a.double(), b, rtol=0, atol=4 * ulp)
    assert (got[0] == 0).equal(scores == -math.inf)


@every_build
@pytest.mark.parametrize("shape", [(3, 1, 1, 1), (2, 5, 33, 70), (1, 130, 64, 200), (2, 4, 65, 16)])
@pytest.mark.parametrize("layout", ["plain", "a transposed", "b transposed", "b strided"])
def test_every_build_multiplies_the_same(shape, layout):
    matrices, rows, columns, depth = shape
    a, b = randn(matrices, rows, depth), randn(matrices, depth, columns, seed=1)
    if layout == "a transposed":
        a = a.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "b transposed":
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "b strided":
        b = torch.stack([b, torch.full_like(b, math.nan)], -1)[..., 0]

    def multiply(a, b):
        out = torch.empty(matrices, rows, columns)
        native.products(out, a, b, 1.5)
        return out

    want = (a.double() @ b.double()) * 1.5
    plain = (a @ b * 1.5).double()
    error, bound = ((x - want).abs().max() for x in (multiply(a, b).double(), plain))
    assert error <= 2 * bound + 2.0**-23 * want.abs().max()


@pytest.mark.native
def test_products_of_no_terms_are_zero():
    out = torch.full((2, 3, 4), math.nan)
    native.products(out, torch.empty(2, 3, 0), torch.empty(2, 0, 4), 1.0)
    assert not out.any()


@pytest.fixture
def _keep_num_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_keep_num_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_for_every_number_of_threads(dtype):
    scores, v = make(3, 4, 200, 300, 64, dtype)
    runs = []
    for num_threads in (2, 2, 1, 3):
        torch.set_num_threads(num_threads)
        runs.append(results(ops.softmax_attention, scores, v, dropout=ops.Dropout(0.1, 0)))
    for run in runs[1:]:
        assert_equal(run, runs[0])


def test_what_is_kept_is_scaled_up():
    scores, _ = make(keys=64)
    values = torch.eye(64).expand(2, 3, 64, 64)
    out, p = ops.softmax_attention(scores, values, dropout=ops.Dropout(0.25, 1))
    assert math.isclose(keep_scale(0.25), 4 / 3)
    kept = out != 0
    assert 0.7 < kept.float().mean() < 0.8
    torch.testing.assert_close(out[kept], p[kept] * (4 / 3))
