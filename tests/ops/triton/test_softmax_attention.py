import pytest
import torch

from taut.ops.random import NO_DROPOUT
from taut.ops.softmax_attention import _softmax_bwd, _softmax_fwd
from taut.ops.triton import softmax_attention as kernels
from taut.testing import assert_accurate
from tests.ops.triton.setting import DEVICE, DTYPES, randn

# (sequences, heads, queries, keys): one number, odd, around a tile, a block and beyond, none
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 5, 33),
    (1, 2, 3, 128),
    (2, 2, 3, 129),
    (1, 2, 3, 1025),
    (1, 1, 2, 5000),
    (0, 2, 3, 4),
    (2, 2, 0, 5),
    (2, 2, 3, 0),
]
SPREAD = 3.0


def arguments(shape, p_drop, has_ids=True):
    """Those of SCHEMA and KEYS_SCHEMA; keys are in no order, and the head is not the first."""
    sequences, _, queries, keys = shape
    if p_drop == 0.0:
        return (*NO_DROPOUT, None, 0)
    if not has_ids:
        return (p_drop, 5, 3, 2, None, None, None, 0)
    gen = torch.Generator().manual_seed(1)
    ids, positions = torch.randint(2**32, (2, sequences * queries), generator=gen).to(DEVICE)
    key_positions = torch.randint(2000, (sequences * keys,), generator=gen).to(DEVICE)
    return (p_drop, 2**62 + 7, 3, 2**31 + 5, ids, positions, key_positions, 4)


def forward(form, shape, where, first=0):
    """form as a function of scores from matrix `first` on, shaped (matrices, queries, keys)."""

    @torch.no_grad()
    def run(scores):
        p = torch.empty_like(scores)
        dropped = torch.empty_like(scores) if where[0] else None
        form(scores.detach(), p, dropped, first, shape[1], *where)
        return p if dropped is None else (p, dropped)

    return run


def backward(form, shape, where, first=0):
    @torch.no_grad()
    def run(p, dp, gradient):
        ds = gradient.detach().clone()
        dropped = torch.empty_like(p) if where[0] else None
        form(p, dp, ds, dropped, first, shape[1], *where)
        return ds if dropped is None else (ds, dropped)

    return run


def make(shape, dtype=torch.float32, is_masked=False):
    """Scores, probabilities, their gradient and that of what dropout leaves of them."""
    matrices = (shape[0] * shape[1], *shape[2:])
    scores, dp, gradient = (randn(*matrices, dtype=dtype, seed=seed) for seed in (0, 1, 2))
    scores *= SPREAD
    if is_masked:
        scores[..., ::3] = -torch.inf
        scores[:, :1] = -torch.inf
    p = torch.empty_like(scores)
    _softmax_fwd(scores, p, None, 0, shape[1], *NO_DROPOUT, None, 0)
    return scores, p, dp, gradient


def check(shape, dtype, where, is_masked=False):
    scores, *inputs = make(shape, dtype, is_masked)
    ours, plain = (forward(form, shape, where) for form in (kernels.softmax_fwd, _softmax_fwd))
    assert_accurate(ours, plain, [scores])
    ours, plain = (backward(form, shape, where) for form in (kernels.softmax_bwd, _softmax_bwd))
    assert_accurate(ours, plain, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p_drop", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_composite(shape, p_drop, dtype):
    check(shape, dtype, arguments(shape, p_drop))


@pytest.mark.parametrize("shape", [(2, 3, 5, 33), (2, 2, 3, 1500)], ids=str)
def test_without_ids_sequences_queries_and_keys_are_known_by_number(shape):
    check(shape, torch.float32, arguments(shape, 0.4, has_ids=False))


@pytest.mark.parametrize("p_drop", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(2, 3, 5, 33), (1, 2, 3, 1500)], ids=str)
def test_hidden_keys_and_blind_queries_give_zeros(shape, p_drop):
    where = arguments(shape, p_drop)
    check(shape, torch.float32, where, is_masked=True)
    scores, *_ = make(shape, is_masked=True)
    p = torch.empty_like(scores)
    kernels.softmax_fwd(scores, p, None, 0, shape[1], *NO_DROPOUT, None, 0)
    assert (p == 0).equal(scores == -torch.inf)


def test_keys_that_a_wide_row_shows_late():
    """What was summed before the first visible key, or before a much higher one, vanishes."""
    scores = torch.full((1, 1, 3000), -torch.inf, device=DEVICE)
    scores[..., 1500:2000] = randn(1, 1, 500)
    scores[..., 2500:2510] = 90 + randn(1, 1, 10)
    shape, where = (1, 1, 1, 3000), (*NO_DROPOUT, None, 0)
    ours, plain = (forward(form, shape, where) for form in (kernels.softmax_fwd, _softmax_fwd))
    assert_accurate(ours, plain, [scores])


def test_a_chunk_draws_what_the_whole_draws():
    shape = (3, 4, 5, 70)
    scores, p, dp, gradient = make(shape)
    for has_ids in (True, False):
        where = arguments(shape, 0.3, has_ids)
        whole = forward(kernels.softmax_fwd, shape, where)(scores)
        back = backward(kernels.softmax_bwd, shape, where)(p, dp, gradient)
        part = forward(kernels.softmax_fwd, shape, where, 5)(scores[5:])
        back_part = backward(kernels.softmax_bwd, shape, where, 5)(p[5:], dp[5:], gradient[5:])
        for got, want in zip((*part, *back_part), (*whole, *back), strict=True):
            assert got.equal(want[5:])


def test_no_gradient_of_the_probabilities():
    shape = (2, 3, 5, 70)
    where = arguments(shape, 0.3)
    _, p, _, gradient = make(shape)
    ours, plain = (backward(form, shape, where) for form in (kernels.softmax_bwd, _softmax_bwd))
    want = plain(p, None, gradient)
    for got, one in zip(ours(p, None, gradient), want, strict=True):
        torch.testing.assert_close(got, one)
