"""dropout draws the documented mask, forward and backward, and keeps nothing."""

import math

import pytest
import torch

from taut import ops
from taut.ops.random import keep_mask, keep_scale
from taut.testing import saved_bytes, saved_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CPU = torch.device("cpu")


def wanted_mask(shape, d):
    return keep_mask(shape, CPU, d.p, d.seed, d.step, d.site, d.sample_ids, d.positions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(9,), (3, 1), (2, 3, 129), (40, 300)], ids=str)
def test_mask_is_the_documented_one_both_ways(shape, dtype):
    rows = math.prod(shape[:-1])
    gen = torch.Generator().manual_seed(3)
    ids, positions = (torch.randint(2**32, (rows,), generator=gen) for _ in range(2))
    for d in (
        ops.Dropout(0.1, 2**62 + 3, 2**32 - 1, 2**31),
        ops.Dropout(0.7, 5, sample_ids=ids, positions=positions),
        ops.Dropout(0.5, 5, 6, 7, sample_ids=ids.view(shape[:-1])),
        ops.Dropout(0.5, 5, 6, 7, positions=positions),
    ):
        x = torch.full(shape, 1.5, dtype=dtype, requires_grad=True)
        y = ops.dropout(x, d)
        (dx,) = torch.autograd.grad(y, x, torch.full(shape, -0.5, dtype=dtype))
        keep = wanted_mask(shape, d)
        assert (y != 0).equal(keep)
        assert (dx != 0).equal(keep)
        scale = torch.tensor(keep_scale(d.p), dtype=torch.float64)
        # one multiplication in the width of fp32 or more, rounded once
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        tolerance = max(torch.finfo(dtype).eps, 2 * eps)
        for got, factor in ((y, 1.5), (dx, -0.5)):
            want = (factor * scale).expand(keep.sum())
            torch.testing.assert_close(got[keep].double(), want, rtol=tolerance, atol=0)


def test_ties_of_the_first_sixteen_bits_are_decided_alike():
    """One column in 2^16 needs more bits; a kernel that forgets them is wrong in 8 of these."""
    d = ops.Dropout(0x4000_8000 / 2**32, 11)
    y = ops.dropout(torch.ones(1024, 1024), d)
    assert (y != 0).equal(wanted_mask(y.shape, d))


def test_a_token_keeps_its_mask_when_the_batch_is_packed_in_another_order():
    ids = torch.tensor([4, 4, 4, 8, 8, 1])
    positions = torch.tensor([0, 1, 2, 0, 1, 0])
    x = torch.randn(6, 50)

    def run(rows):
        return ops.dropout(
            x[rows], ops.Dropout(0.4, 1, 2, 3, sample_ids=ids[rows], positions=positions[rows])
        )

    order = torch.tensor([5, 3, 4, 0, 1, 2])
    together = run(torch.arange(6))
    assert run(order).equal(together[order])
    assert torch.cat([run(torch.tensor([i])) for i in range(6)]).equal(together)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_dropped_is_zero_whatever_it_was(dtype):
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=dtype).repeat(64, 8)
    d = ops.Dropout(0.5, 0)
    y, keep = ops.dropout(x, d), wanted_mask(x.shape, d)
    assert (y[~keep] == 0).all()
    assert y[keep].isfinite().equal(x[keep].isfinite())


@pytest.mark.parametrize("dropout", [None, ops.Dropout(0.0, 0)])
def test_without_dropout_the_output_is_a_copy(dropout):
    x = torch.randn(3, 5)
    y = ops.dropout(x, dropout)
    assert y.equal(x)
    assert y.data_ptr() != x.data_ptr()


def test_keeps_nothing():
    assert saved_tensors(ops.dropout, torch.randn(20, 30), ops.Dropout(0.1, 0)) == []


def test_coordinates_are_kept_as_they_are():
    """They belong to the batch, and all dropouts of a model share them."""
    ids, positions = torch.arange(20), torch.arange(20)

    def twice(x):
        for site in range(2):
            d = ops.Dropout(0.1, 0, 0, site, sample_ids=ids, positions=positions)
            x = ops.dropout(x, d)
        return x

    assert saved_bytes(twice, torch.randn(20, 30)) == ids.nbytes + positions.nbytes
