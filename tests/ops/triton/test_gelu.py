import importlib

import pytest
import torch

from taut.ops.triton import gelu as kernels
from taut.testing import assert_accurate
from tests.ops.triton.setting import DEVICE, DTYPES, randn, without_grad

op = importlib.import_module("taut.ops.gelu")  # taut.ops.gelu is the function
SIZES = [(1,), (7,), (8,), (9,), (3, 5, 7), (1023,), (1024,), (2, 1025), (0, 4)]
FORMS = pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])


def reference_fwd(x, tanh):
    return op.gelu_reference(x, tanh)


def derivative(x, tanh):
    x = x.detach().double().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(op.gelu_reference(x, tanh).sum(), x)[0]


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_output_matches_the_reference(shape, dtype, tanh):
    x = 3 * randn(*shape, dtype=dtype)
    forward = without_grad(lambda x, tanh: kernels.gelu_fwd(x, tanh)[0])
    assert_accurate(forward, without_grad(reference_fwd), [x, tanh])


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_bits_say_on_which_side_of_the_minimum(shape, dtype, tanh):
    x = 3 * randn(*shape, dtype=dtype)
    low = op.MINIMA[tanh].x
    x[..., ::2] = low + (x[..., ::2] - low) * 2**-8  # many close to it
    side = kernels.gelu_fwd(x, tanh)[1]
    assert (side.dtype, side.shape) == (torch.uint8, ((x.numel() + 7) // 8,))
    bits = (side.view(-1, 1) >> torch.arange(8, device=DEVICE) & 1).flatten()
    assert torch.equal(bits[: x.numel()] == 1, (x.double() >= low).flatten())
    assert not bits[x.numel() :].any()


@FORMS
def test_gradient_is_within_its_bounds(tanh):
    x = torch.linspace(-9, 6, 65537, device=DEVICE)
    dx = kernels.gelu_bwd(torch.ones_like(x), *kernels.gelu_fwd(x, tanh), tanh)
    error = (dx - derivative(x, tanh)).abs()
    assert error.max() < 1.5e-4
    assert error[(x - op.MINIMA[tanh].x).abs() > 0.01].max() < 3e-6


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_gradient_is_as_good_as_the_composite(shape, dtype, tanh):
    x, dy = 3 * randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    y, side = op._composite_fwd(x, tanh)
    got, plain = kernels.gelu_bwd(dy, y, side, tanh), op._composite_bwd(dy, y, side, tanh)
    assert (got.shape, got.dtype) == (x.shape, dtype)
    # both see the one y, whose rounding is what makes them err where the inverse is steep
    near = 2 * torch.finfo(dtype).eps ** 0.5 * (x.double() - op.MINIMA[tanh].x).abs().lt(0.5)
    bound = 2 * torch.finfo(dtype).eps * dy.abs().double() * 2 + near * dy.abs().double()
    assert ((got.double() - plain.double()).abs() <= bound).all()


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # NumPy's, of infinity
@FORMS
def test_far_tails(tanh):
    x = torch.tensor([-1e30, -100.0, -20.0, 12.0, 100.0, 1e30, float("inf")], device=DEVICE)
    y, side = kernels.gelu_fwd(x, tanh)
    assert torch.equal(y, torch.tensor([0, 0, 0, 12, 100, 1e30, float("inf")], device=DEVICE))
    dx = kernels.gelu_bwd(torch.ones_like(x), y, side, tanh)
    assert torch.equal(dx, torch.tensor([0.0, 0, 0, 1, 1, 1, 1], device=DEVICE))


@FORMS
def test_nan_goes_through(tanh):
    x = torch.tensor([float("nan"), 1.0], device=DEVICE)
    y, side = kernels.gelu_fwd(x, tanh)
    assert y.isnan().tolist() == [True, False]
    dx = kernels.gelu_bwd(torch.ones_like(x), y, side, tanh)
    assert dx.isnan().tolist() == [True, False]
