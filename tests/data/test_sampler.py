import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taut.data import TokenBudgetSampler

LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=200)


@given(lengths=LENGTHS, budget=st.integers(1, 300), seed=st.integers(0, 2**40))
def test_every_sample_once_within_the_budget(lengths, budget, seed):
    batches = TokenBudgetSampler(lengths, budget_tokens=budget, seed=seed).global_batches()
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= budget
    totals = [sum(lengths[i] for i in batch) for batch in batches]
    for total, following in zip(totals, batches[1:], strict=False):
        assert total + lengths[following[0]] > budget  # a batch ends where the next does not fit


@given(lengths=LENGTHS, ranks=st.integers(1, 5), epoch=st.integers(0, 3))
def test_ranks_share_the_batches_that_one_has(lengths, ranks, epoch):
    kwargs = {"budget_tokens": 200, "seed": 3}
    samplers = [
        TokenBudgetSampler(lengths, rank=rank, world_size=ranks, **kwargs) for rank in range(ranks)
    ]
    alone = TokenBudgetSampler(lengths, **kwargs)
    for sampler in (*samplers, alone):
        sampler.set_epoch(epoch)
    for whole, *shares in zip(alone, *samplers, strict=True):
        assert sorted(i for share in shares for i in share) == sorted(whole)
        loads = [sum(lengths[i] for i in share) for share in shares]
        assert max(loads) - min(loads) <= max(lengths[i] for i in whole)


def test_epochs_and_seeds_differ_and_repeat():
    sampler = TokenBudgetSampler([5] * 100, budget_tokens=50)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(TokenBudgetSampler([5] * 100, budget_tokens=50, seed=1)) != first
    assert len(sampler) == len(first) == 10


def test_lengths_do_not_stand_in_order():
    """Batches are no worse mixed than by chance: neighbours in length meet as often as others."""
    lengths = np.arange(1, 2001)
    batches = TokenBudgetSampler(lengths, budget_tokens=20_000).global_batches()
    means = np.array([lengths[batch].mean() for batch in batches])
    expected = lengths.std() / np.sqrt(np.mean([len(batch) for batch in batches]))
    assert means.std() < 1.5 * expected


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {"budget_tokens": 1}, "lengths must be at least one number"),
        ([3, -1], {"budget_tokens": 1}, "none negative"),
        ([3], {"budget_tokens": 0}, "budget_tokens must be positive"),
        ([3], {"budget_tokens": 1, "rank": 2, "world_size": 2}, "got 1, rank 2 of 2"),
    ],
)
def test_refuses(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        TokenBudgetSampler(lengths, **options)
