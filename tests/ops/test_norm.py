"""dropout_add_norm: dropout, residual and norm in one pass, x-hat kept and nothing else."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from taut import ops
from taut.ops.norm import dropout_add_norm_reference
from taut.ops.random import NO_DROPOUT, keep_mask, keep_scale
from taut.testing import assert_accurate, saved_bytes, saved_tensors
from tests.ops.catalogue import norm_inputs, positional_x_bias

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["layer", "rms"]
NORM = positional_x_bias(ops.dropout_add_norm)
REFERENCE = positional_x_bias(dropout_add_norm_reference)


def randn(*shape, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def raw_forward(x, eps=1e-5, is_rms=False):
    """y, x-hat, rstd, sum of the plain norm of x."""
    return torch.ops.taut.norm_fwd(x, None, None, None, None, eps, is_rms, False, *NO_DROPOUT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("num_left_out", range(5))
def test_every_combination_of_inputs(kind, p, num_left_out):
    """Each is a path of its own through the kernels."""
    names = ("residual", "weight", "bias", "x_bias")
    dropout = ops.Dropout(p, 3)
    for without in itertools.combinations(names, num_left_out):
        inputs = norm_inputs(torch.Generator().manual_seed(0), (8, 70), torch.float32, without)
        for return_sum in (False, True):
            options = {"kind": kind, "dropout": dropout, "return_sum": return_sum}
            assert_accurate(NORM, REFERENCE, inputs, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("used", [0, 1], ids=["norm", "sum"])
def test_either_output_may_go_unused(kind, used):
    *rows, weight, bias, _ = norm_inputs(torch.Generator().manual_seed(0), (6, 70), torch.float32)
    dy = [None, None]
    dy[used] = randn(6, 70, seed=1)
    fn, reference = (
        lambda x, residual, form=form: form(
            *(x, residual, weight, bias), kind=kind, dropout=ops.Dropout(0.2, 3), return_sum=True
        )
        for form in (ops.dropout_add_norm, dropout_add_norm_reference)
    )
    assert_accurate(fn, reference, rows, dy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_mask_is_the_documented_one_both_ways(kind, dtype):
    x, x_bias = randn(30, 300, dtype=dtype).abs() + 1, torch.ones(300, dtype=dtype)
    x.requires_grad_()
    d = ops.Dropout(0.3, 2**40, 5, 6, sample_ids=torch.arange(30) // 7, positions=torch.arange(30))
    y, z = ops.dropout_add_norm(
        x, torch.zeros_like(x), None, x_bias=x_bias, kind=kind, dropout=d, return_sum=True
    )
    keep = keep_mask(x.shape, x.device, 0.3, 2**40, 5, 6, d.sample_ids, d.positions)
    assert (z != 0).equal(keep)
    (dx,) = torch.autograd.grad(y, x, randn(30, 300, dtype=dtype, seed=1))
    assert (dx != 0).equal(keep)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_zero_is_harmless(kind, dtype):
    """x-hat cannot be recovered from an output that is all bias, so it must have been kept."""
    x, residual, weight, bias, x_bias = norm_inputs(
        torch.Generator().manual_seed(0), (16, 70), dtype
    )
    weight[::2] = 0
    bias[1] = 1000
    inputs = (x, residual, weight, bias, x_bias)
    assert_accurate(NORM, REFERENCE, inputs, kind=kind)
    inputs = (x, residual, torch.zeros_like(weight), bias, x_bias)
    assert_accurate(NORM, REFERENCE, inputs, kind=kind)


def test_variance_survives_a_large_mean():
    x = 1000 + randn(40, 300)
    _, _, rstd, _ = raw_forward(x, eps=0.0)
    truth = x.double().var(-1, correction=0)

    def relative_error(variance):
        return ((variance.double() - truth) / truth).abs().max()

    assert relative_error(rstd.double() ** -2) < 1e-4  # a mean rounded to 1000 * 2^-24 costs 4e-9
    one_pass = x.square().mean(-1) - x.mean(-1).square()
    assert relative_error(one_pass) > 0.01  # so the bound does tell the two formulas apart


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [300.0, 2e-4])
def test_squares_out_of_the_range_of_16_bits(kind, dtype, scale):
    x, residual, *vectors = norm_inputs(torch.Generator().manual_seed(0), (16, 70), dtype)
    inputs = (x * scale, residual * scale, *vectors)
    # x_bias would drown the small rows, and eps their variance
    inputs = (*inputs[:4], None)
    assert_accurate(NORM, REFERENCE, inputs, kind=kind, eps=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_constant_rows(kind):
    x = torch.full((3, 65), 7.0)
    weight, bias = randn(65), randn(65, seed=1)
    assert_accurate(NORM, REFERENCE, (x, None, weight, bias, None), kind=kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_one_number(dtype):
    """y is nearly the sign of x, and dx the difference of two nearly equal terms.

    The rounding of x-hat stays where they cancel: the bound is of the terms, not of dx.
    """
    x, dy = randn(64, 1, dtype=dtype).requires_grad_(), randn(64, 1, dtype=dtype, seed=1)
    y = ops.dropout_add_norm(x, None, None, kind="rms")
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_accurate(NORM, REFERENCE, (x, *(None,) * 4), (torch.zeros_like(dy),), kind="rms")
    wide = x.detach().double().requires_grad_()
    truth = dropout_add_norm_reference(wide, None, None, kind="rms")
    (truth_dx,) = torch.autograd.grad(truth, wide, dy.double())
    rstd = (wide.detach().square() + 1e-5).rsqrt()
    # the error of x-hat, half an ulp of at most 1, counts twice in x-hat squared; the rest is fp32
    bound = dy.double().abs() * rstd * (torch.finfo(dtype).eps + 8 * 2.0**-24)
    assert ((dx - truth_dx).abs() <= bound + truth_dx.abs() * torch.finfo(dtype).eps).all()


def test_layer_norm_and_rms_norm_differ():
    x = 3 + randn(4, 50)
    layer, rms = (ops.dropout_add_norm(x, None, None, kind=kind) for kind in KINDS)
    assert (layer - rms).abs().mean() > 0.5
    torch.testing.assert_close(layer, nn.functional.layer_norm(x, (50,)))
    torch.testing.assert_close(rms, nn.functional.rms_norm(x, (50,), eps=1e-5))


def test_eps_is_used():
    x = 1e-3 * randn(4, 50)
    for kind in KINDS:
        assert_accurate(NORM, REFERENCE, (x, *(None,) * 4), kind=kind, eps=0.1)
        assert_accurate(NORM, REFERENCE, (x, *(None,) * 4), kind=kind, eps=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_keeps_x_hat_and_four_bytes_a_row(kind, dtype):
    x, residual = randn(20, 30, dtype=dtype), randn(20, 30, dtype=dtype)
    weight, bias, x_bias = (nn.Parameter(randn(30, dtype=dtype)) for _ in range(3))
    fn = partial(ops.dropout_add_norm, kind=kind, dropout=ops.Dropout(0.1, 0), x_bias=x_bias)
    assert saved_bytes(fn, x, residual, weight, bias) == x.nbytes + 4 * 20
    assert saved_bytes(partial(fn, return_sum=True), x, residual, weight, bias) == x.nbytes + 4 * 20
    kept = saved_tensors(fn, x, residual, weight, bias)
    assert [(t.shape, t.dtype) for t in kept] == [((20, 30), dtype), ((20,), torch.float32)]


@pytest.fixture
def _keep_num_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_keep_num_threads")
@pytest.mark.parametrize("shape", [(1, 8), (5000, 8), (999, 65)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_column_sums_give_the_same_bits_every_time(shape, dtype):
    inputs = norm_inputs(torch.Generator().manual_seed(0), shape, dtype)
    dy = randn(*shape, dtype=dtype, seed=1)
    runs = []
    for num_threads in (2, 2, 2, 1, 3):
        torch.set_num_threads(num_threads)
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = NORM(*leaves, dropout=ops.Dropout(0.1, 0))
        runs.append(torch.autograd.grad(y, leaves, dy))
    for run in runs[1:]:
        assert all(a.equal(b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_column_sums_of_many_rows_are_accurate(dtype):
    """Sums of 16-bit numbers in 16 bits would stop growing after a few hundred rows."""
    inputs = norm_inputs(torch.Generator().manual_seed(0), (5000, 8), dtype)
    dy = 1 + randn(5000, 8, dtype=dtype, seed=1)
    assert_accurate(NORM, REFERENCE, inputs, dy)
    leaves = [x.clone().requires_grad_() for x in inputs]
    (dbias,) = torch.autograd.grad(NORM(*leaves), leaves[3], dy)
    # PyTorch may be wrong in the same way: dbias is a plain sum, right to half an ulp
    torch.testing.assert_close(
        dbias.double(), dy.double().sum(0), rtol=max(torch.finfo(dtype).eps / 2, 1e-6), atol=0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_scales_what_it_keeps(kind):
    x = randn(8, 40)
    d = ops.Dropout(0.25, 1)
    _, z = ops.dropout_add_norm(x, None, None, kind=kind, dropout=d, return_sum=True)
    assert math.isclose(keep_scale(0.25), 4 / 3)
    kept = z != 0
    torch.testing.assert_close(z[kept], x[kept] * (4 / 3), rtol=2.0**-23, atol=0)
