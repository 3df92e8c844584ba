import pytest
import torch

from taut.ops.random import NO_DROPOUT, apply_dropout, keep_mask
from taut.ops.triton.dropout import dropout
from taut.testing import assert_accurate
from tests.ops.triton.setting import DTYPES, coordinates, randn, without_grad

# one element, odd and 3-D, around a tile and a block, empty
SHAPES = [(1, 1), (7, 7), (3, 5, 63), (2, 128), (5, 129), (7, 300), (7, 1100), (0, 8), (2, 0, 5)]


def run(x, *arguments):
    return dropout(x, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_composite(shape, dtype):
    x = randn(*shape, dtype=dtype)
    arguments = coordinates(0.1, x[..., 0].numel())
    assert_accurate(without_grad(run), without_grad(apply_dropout), [x, *arguments])


@pytest.mark.parametrize("p", [0.001, 0.5, 0.99])
def test_drops_what_the_coordinates_say(p):
    arguments = coordinates(p, 64)
    ones = torch.ones_like(randn(64, 200))
    keep = keep_mask(ones.shape, ones.device, *arguments)
    assert 0 < (~keep).sum() < keep.numel()
    assert torch.equal(run(ones, *arguments) != 0, keep)


def test_without_dropout_gives_a_copy():
    x = randn(3, 5)
    y = dropout(x, NO_DROPOUT)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()


def test_what_is_dropped_is_zero_whatever_it_was():
    arguments = coordinates(0.5, 8)
    x = torch.full_like(randn(8, 32), float("nan"))
    y = run(x, *arguments)
    keep = keep_mask(x.shape, x.device, *arguments)
    assert torch.equal(y == 0, ~keep)
    assert torch.equal(y.isnan(), keep)
