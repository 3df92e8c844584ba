import importlib

import pytest
import torch

from taut.ops.triton import mlp as kernels
from taut.testing import assert_accurate
from tests.ops.triton.setting import DTYPES, coordinates, randn, without_grad

op = importlib.import_module("taut.ops.mlp")  # taut.ops.mlp is the function
SHAPES = [(1, 1), (7, 1), (1, 7), (3, 5, 63), (7, 130), (7, 300), (0, 256), (2, 0, 5)]

fwd, bwd = without_grad(kernels.activation_fwd), without_grad(kernels.activation_bwd)
composite_fwd, composite_bwd = without_grad(op._composite_fwd), without_grad(op._composite_bwd)


def make_arguments(shape, dtype, activation, p):
    """da, u, activation and dropout."""
    *rows, width = shape
    u_width = width * (2 if op.ACTIVATIONS[activation][1] else 1)
    da, u = randn(*shape, dtype=dtype), 2 * randn(*rows, u_width, dtype=dtype, seed=1)
    return [da, u, activation, *coordinates(p, torch.Size(rows).numel())]


def check(shape, dtype, activation, p):
    arguments = make_arguments(shape, dtype, activation, p)
    assert_accurate(fwd, composite_fwd, arguments[1:])
    assert_accurate(bwd, composite_bwd, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", op.ACTIVATIONS)
def test_matches_the_composite(activation, dtype):
    check((7, 130), dtype, activation, 0.1)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_matches_the_composite(shape, p, activation):
    check(shape, torch.float32, activation, p)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", op.ACTIVATIONS)
def test_backward_rebuilds_the_bits_of_the_forward(activation, dtype, p):
    arguments = make_arguments((5, 300), dtype, activation, p)
    assert torch.equal(bwd(*arguments)[1], fwd(*arguments[1:]))


def test_more_rows_than_groups(monkeypatch):
    monkeypatch.setattr(kernels, "MAX_GROUPS", 3)
    monkeypatch.setattr(kernels, "MIN_STEPS", 1)
    for shape in ((50, 1030), (61, 100)):
        check(shape, torch.float32, "geglu", 0.1)


def test_column_sums_do_not_depend_on_chance():
    arguments = make_arguments((200, 40), torch.float32, "silu", 0.1)
    assert torch.equal(bwd(*arguments)[2], bwd(*arguments)[2])


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # NumPy's, of infinity
@pytest.mark.parametrize("activation", op.PLAIN)
def test_large_arguments(activation):
    u = torch.tensor([[-1e25, -300.0, -30.0, 30.0, 300.0, 1e25]]).to(randn(1))
    a = fwd(u, activation, *coordinates(0.0, 1))
    torch.testing.assert_close(a, u.clamp_min(0))
    u = u.clamp(-1e6, 1e6)
    du, _, _ = bwd(torch.ones_like(u), u, activation, *coordinates(0.0, 1))
    torch.testing.assert_close(du, (u > 0).to(u))


@pytest.mark.parametrize("activation", op.PLAIN)
def test_nan_goes_through(activation):
    u = torch.tensor([[float("nan"), 1.0]]).to(randn(1))
    du, a, dbias = bwd(torch.ones_like(u), u, activation, *coordinates(0.0, 1))
    for t in (fwd(u, activation, *coordinates(0.0, 1)), a):
        assert t.isnan().tolist() == [[True, False]]
    if activation != "relu":  # whose slope is 1 there, as in PyTorch
        assert du.isnan().tolist() == [[True, False]]
        assert dbias.isnan().tolist() == [True, False]
