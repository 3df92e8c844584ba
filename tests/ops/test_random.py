"""The generator is the published one, its decisions are the documented ones, and they look random.

Statistics are of fixed seeds and bounded at 5 standard deviations: one seed in a million fails."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from taut.ops.random import (
    NO_DROPOUT,
    Dropout,
    apply_dropout,
    derive_key,
    keep_mask,
    keep_scale,
    op_arguments,
    philox,
    threshold,
)

CPU = torch.device("cpu")
words32 = st.integers(0, 2**32 - 1)


def mask(rows=256, width=1024, p=0.5, seed=11, step=0, site=0, sample_ids=None, positions=None):
    return keep_mask((rows, width), CPU, p, seed, step, site, sample_ids, positions)


KNOWN_ANSWERS = [  # counter, key, words
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]


@pytest.mark.parametrize("known", KNOWN_ANSWERS)
def test_philox_gives_the_published_words(known):
    """The known-answer file of Random123, philox4x32 with 10 rounds."""
    numbers = [int(x, 16) for x in known.split()]
    counter, key, words = numbers[:4], numbers[4:6], numbers[6:]
    assert list(philox(counter, key, 10)) == words
    assert [int(x) for x in philox([torch.tensor(c) for c in counter], key, 10)] == words


@given(st.tuples(*[words32] * 4), st.tuples(words32, words32))
def test_philox_of_ints_and_of_tensors_is_the_same(counter, key):
    want = philox(counter, key)
    assert [int(x) for x in philox([torch.tensor(c) for c in counter], key)] == list(want)
    assert all(0 <= x < 2**32 for x in want)


def documented_decision(column, position, sample_id, p, seed, step, site):
    """The text on top of ops/random.py, one column at a time."""
    key = philox((seed % 2**32, seed // 2**32, step, site), (0, 0), rounds=10)[:2]
    tile, inside = divmod(column, 128)
    word, inside = divmod(inside, 32)
    lane, half = divmod(inside, 2)

    words = philox((16 * tile + lane, position, 0, sample_id), key, rounds=7)
    hashed = words[(word + 1) % 4] * 0x9E3779B9 % 2**32
    hashed ^= hashed >> 15
    upper, lower = (x >> 16 * half & 0xFFFF for x in (words[word], hashed))
    u = upper << 16 | lower
    return u >= round(p * 2**24) * 2**8


def test_decisions_are_the_documented_ones():
    rows = [(0, 0), (2**32 - 1, 5), (3, 2**32 - 1)]
    positions, sample_ids = torch.tensor(rows).unbind(1)
    coordinates = (0.37, 2**62 + 12345, 2**32 - 1, 2**31 + 7)
    got = keep_mask((3, 300), CPU, *coordinates, sample_ids, positions)
    want = [[documented_decision(c, *row, *coordinates) for c in range(300)] for row in rows]
    assert got.tolist() == want


def test_ties_of_the_first_sixteen_bits_are_decided_by_the_others():
    p = (0x4000_8000) / 2**32
    high = mask(1024, 1024, p=0x4000_0000 / 2**32)  # keeps all ties
    low = mask(1024, 1024, p=0x4001_0000 / 2**32)  # drops all ties
    tied = (high & ~low).nonzero()
    assert 2 <= len(tied) <= 50  # 16 expected
    got = mask(1024, 1024, p=p)
    assert [bool(got[r, c]) for r, c in tied] == [
        documented_decision(int(c), int(r), 0, p, 11, 0, 0) for r, c in tied
    ]
    assert got[tuple(tied.T)].unique().tolist() == [False, True]
    assert got.equal(high & ~(high & ~low & ~got))


def test_without_coordinates_rows_are_numbered():
    want = mask(6, 40, sample_ids=torch.zeros(6, dtype=torch.int64), positions=torch.arange(6))
    assert mask(6, 40).equal(want)
    assert keep_mask((2, 3, 40), CPU, 0.5, 11, 0, 0).equal(want.view(2, 3, 40))
    assert keep_mask((40,), CPU, 0.5, 11, 0, 0).equal(want[0])


def test_a_row_draws_the_same_wherever_it_lies():
    ids = torch.tensor([7, 7, 7, 2, 9, 9])
    positions = torch.tensor([0, 1, 2, 0, 0, 1])
    packed = mask(6, 200, sample_ids=ids, positions=positions)
    assert len({tuple(row.tolist()) for row in packed}) == 6
    order = torch.tensor([4, 2, 0, 5, 3, 1])
    assert mask(6, 200, sample_ids=ids[order], positions=positions[order]).equal(packed[order])
    for i in range(6):
        alone = mask(1, 200, sample_ids=ids[i : i + 1], positions=positions[i : i + 1])
        assert alone[0].equal(packed[i])


@pytest.mark.parametrize("width", [1, 15, 16, 17, 32, 64, 127, 128, 129, 300])
def test_a_column_does_not_depend_on_the_width(width):
    assert mask(5, width).equal(mask(5, 1000)[:, :width])


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7), (1, 1)], ids=str)
def test_any_number_of_rows(shape):
    assert keep_mask(shape, CPU, 0.5, 0, 0, 0).shape == shape


@given(st.floats(0, 1, exclude_max=True))
def test_the_probability_is_exact_to_24_bits(p):
    dropped = threshold(p) / 2**32
    assert threshold(p) % 2**8 == 0
    assert dropped < 1
    # the largest p of all cannot be rounded up to 1
    assert abs(dropped - p) <= 2**-25 or (p > 1 - 2**-24 and abs(dropped - p) <= 2**-24)
    assert math.isclose(keep_scale(p) * (1 - dropped), 1, rel_tol=1e-15)


def test_no_dropout_draws_nothing(monkeypatch):
    x = torch.ones(2, 3)
    monkeypatch.setattr("taut.ops.random.philox", None)
    derive_key.cache_clear()
    for dropout in (None, Dropout(0.0, 1), Dropout(2.0**-26, 1)):
        assert op_arguments("op", dropout, x) == NO_DROPOUT
    assert apply_dropout(x, *NO_DROPOUT) is x
    with pytest.raises(TypeError):
        apply_dropout(x, *op_arguments("op", Dropout(0.5, 1), x))


@pytest.mark.parametrize("p", [2.0**-10, 0.1, 1 / 3, 0.5, 0.9, 0.999])
def test_frequency(p):
    drops = (~mask(512, 1024, p)).double()
    num = drops.numel()
    assert abs(drops.sum() - num * p) < 5 * math.sqrt(num * p * (1 - p))
    for dim in (0, 1):  # chi-square of rows, of columns: no coordinate is favoured
        each = drops.sum(dim)
        expected = num * p / len(each)
        chi_square = ((each - expected) ** 2).sum() / (expected * (1 - p))
        # below a few expected drops the counts are skewed and their squares spread more
        spread = math.sqrt(2 + 1 / (expected * (1 - p)))
        assert abs(chi_square - len(each)) < 5 * spread * math.sqrt(len(each))


def test_runs():
    bits = mask(512, 512).flatten()
    num_runs = 1 + (bits[1:] != bits[:-1]).sum()
    assert abs(num_runs - len(bits) / 2) < 5 * math.sqrt(len(bits)) / 2


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_bytes_of_words_are_uniform(shift):
    counter = (torch.arange(2**15), 3, 0, 4)
    for word in philox(counter, derive_key(1, 2, 3)):
        seen = torch.bincount(word >> shift & 0xFF, minlength=256).double()
        expected = 2**15 / 256
        chi_square = ((seen - expected) ** 2 / expected).sum()
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def assert_unrelated(a, b):
    """Two masks of p = 0.5 agree half of the time."""
    excess = 2 * (a == b).sum() - a.numel()
    assert abs(excess) < 5 * math.sqrt(a.numel())


@pytest.mark.parametrize("distance", [1, 2, 16, 31, 32, 64, 127, 128])
def test_neighbouring_columns_are_unrelated(distance):
    bits = mask()
    assert_unrelated(bits[:, distance:], bits[:, :-distance])


@pytest.mark.parametrize("distance", [1, 2, 128])
def test_neighbouring_rows_are_unrelated(distance):
    bits = mask()
    assert_unrelated(bits[distance:], bits[:-distance])


CHANGES = {
    "step": {"step": 1},
    "high step": {"step": 2**31},
    "site": {"site": 1},
    "high site": {"site": 2**31},
    "seed": {"seed": 12},
    "high seed": {"seed": 11 + 2**32},
    "sample": {"sample_ids": torch.tensor([1])},
    "high sample": {"sample_ids": torch.tensor([2**31])},
    "positions": {"positions": torch.arange(256) + 256},
    "samples for positions": {
        "positions": torch.zeros(256, dtype=torch.int64),
        "sample_ids": torch.arange(256),
    },
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_coordinate_changes_the_mask(change):
    assert_unrelated(mask()[1:], mask(**change)[1:])  # row 0 is position 0 of sample 0 in the last


def test_step_and_site_do_not_make_up_for_each_other():
    assert_unrelated(mask(step=1, site=2), mask(step=2, site=1))
    assert_unrelated(mask(seed=1, step=2), mask(seed=2, step=1))
