"""gelu recovers its input from its output and one bit, as far as the precision of y goes."""

import math

import pytest
import torch
from torch.nn import functional as F

from taut import ops
from taut.ops.gelu import MINIMA, derivatives, gelu_reference
from taut.testing import assert_accurate, saved_bytes, saved_tensors

GRID = torch.linspace(-9, 6, 65537)
both_forms = pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])


def slopes(x, tanh, form=ops.gelu):
    x = x.detach().clone().requires_grad_()
    (dx,) = torch.autograd.grad(form(x, tanh).sum(), x)
    return dx


@both_forms
def test_gradient_of_fp32(tanh):
    error = (slopes(GRID, tanh) - slopes(GRID.double(), tanh, gelu_reference)).abs()
    is_far = (GRID - MINIMA[tanh].x).abs() > 0.01
    # at the minimum an ulp of y, 1.5e-8, is sqrt(2 * 1.5e-8 / 0.43) = 2.6e-4 of x, times 0.43 of dx
    assert error.max() < 1.5e-4
    assert error[is_far].max() < 3e-6


@both_forms
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 6.6e-3), (torch.bfloat16, 1.6e-2)], ids=str
)
def test_gradient_of_16_bits(tanh, dtype, bound):
    """The bounds are those of the best inverse there is of a y in 16 bits (see `mechanisms`), plus
    half an ulp of a slope of at most 1.13, to which the gradient is rounded."""
    x = GRID.to(dtype)
    error = (slopes(x, tanh) - slopes(x.double(), tanh, gelu_reference)).abs()
    assert error.max() < bound + torch.finfo(dtype).eps / 2
    assert error.mean() < bound / 10  # it is as large as that near the minimum alone


@both_forms
def test_second_derivatives_are_right(tanh):
    """Both Halley steps lean on them."""
    x = GRID[::64].double().requires_grad_()
    y = gelu_reference(x, tanh)
    (dy,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (ddy,) = torch.autograd.grad(dy.sum(), x)
    # float64 itself; in its tails the reference cancels, hence no relative bound alone
    torch.testing.assert_close(derivatives(x, tanh), (y, dy, ddy), rtol=1e-12, atol=1e-12)


@both_forms
def test_minimum_is_one(tanh):
    low = MINIMA[tanh]
    y, dy, ddy = derivatives(torch.tensor(low.x, dtype=torch.float64), tanh)
    assert math.isclose(y, low.y, rel_tol=1e-14)
    assert abs(dy) < 1e-14
    assert math.isclose(ddy, low.curvature, rel_tol=1e-6)


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_either_side_of_the_minimum(tanh, dtype):
    """The bit alone tells them apart: a flipped one turns the sign of the slope."""
    x = torch.tensor([-2.0, -1.0, -0.9, -0.6, -0.5, -0.25], dtype=dtype).repeat(7)
    dx = slopes(x, tanh)
    assert (dx < 0).equal(x < MINIMA[tanh].x)
    assert (dx > 0).equal(x > MINIMA[tanh].x)


@both_forms
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000])
def test_one_bit_an_element(tanh, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)) - 0.75
    y, side = torch.ops.taut.gelu_fwd(x, tanh)
    assert (side.shape, side.dtype) == ((math.ceil(n / 8),), torch.uint8)
    bits = (side.view(-1, 1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten()
    assert bits[:n].bool().equal(x >= MINIMA[tanh].x)
    assert not bits[n:].any()
    assert y.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 8, 1001])
def test_keeps_its_output_and_a_bit_an_element(n, dtype):
    x = torch.randn(n).to(dtype)
    assert saved_bytes(ops.gelu, x) == x.nbytes + math.ceil(n / 8)
    kept = saved_tensors(lambda x: F.linear(ops.gelu(x), torch.ones(2, n, dtype=dtype)), x)
    # the next linear keeps the same tensor, and its weight, which is no parameter here
    assert sum(t.num_bytes for t in kept) == x.nbytes + math.ceil(n / 8) + 2 * x.nbytes


def test_erf_and_tanh_differ():
    assert (ops.gelu(GRID) - ops.gelu(GRID, tanh=True)).abs().max() > 1e-4
    assert (slopes(GRID, False) - slopes(GRID, True)).abs().max() > 1e-4


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_is_as_accurate_as_pytorch_everywhere(tanh, dtype):
    x = GRID.to(dtype)
    no_dy = torch.zeros_like(x)
    assert_accurate(ops.gelu, gelu_reference, [x], no_dy, tanh=tanh)


def assert_zero_is_tiny(x, want):
    """Exact, but for what an exp that ends above 0 leaves: no step of training feels 1e-30."""
    want = torch.tensor(want, dtype=x.dtype)
    torch.testing.assert_close(x, want, rtol=0, atol=1e-30, equal_nan=True)


@both_forms
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_extreme_inputs(tanh, dtype):
    large = [20.0, 100.0, 6e4]
    x = torch.tensor([*large, 0.0, -0.0, *(-x for x in large)], dtype=dtype)
    y, dx = ops.gelu(x, tanh), slopes(x, tanh)
    assert_zero_is_tiny(y, [*x[:3].tolist(), 0.0, 0.0, 0.0, 0.0, 0.0])
    assert_zero_is_tiny(dx, [1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0])


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_not_finite(tanh, dtype):
    x = torch.tensor([math.inf, -math.inf, math.nan] * 3, dtype=dtype)
    # PyTorch agrees, but of +inf it makes NaN in some of its forms; the limits are inf and 1
    assert_zero_is_tiny(ops.gelu(x, tanh), [math.inf, math.nan, math.nan] * 3)
    assert_zero_is_tiny(slopes(x, tanh), [1.0, math.nan, math.nan] * 3)


@both_forms
def test_the_largest_fp32(tanh):
    x = torch.tensor([3e38, 1e20, -1e20, -3e38])
    assert_zero_is_tiny(ops.gelu(x, tanh), [3e38, 1e20, 0.0, 0.0])
    assert_zero_is_tiny(slopes(x, tanh), [1.0, 1.0, 0.0, 0.0])


@both_forms
def test_the_left_tail_underflows_to_zero(tanh):
    """y becomes 0 long before x ends; so must the slope, from whatever the inverse starts."""
    x = torch.linspace(-40, -4, 4001)
    error = (slopes(x, tanh) - slopes(x.double(), tanh, gelu_reference)).abs()
    assert error.max() < 3e-7  # of slopes below 6e-4
    assert slopes(torch.linspace(-40, -14, 1001), tanh).abs().max() < 1e-30


@both_forms
def test_upstream_gradients_scale_the_slope(tanh):
    x = GRID[::31].clone().requires_grad_()
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    (dx,) = torch.autograd.grad(ops.gelu(x, tanh), x, dy)
    assert dx.equal(dy * slopes(x, tanh))
