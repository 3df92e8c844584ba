"""mlp keeps its input and the pre-activation, and rebuilds the activation bit by bit."""

import math

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from taut import ops
from taut.ops.mlp import ACTIVATIONS, activate, mlp_reference
from taut.ops.random import NO_DROPOUT, keep_mask, keep_scale, op_arguments
from taut.testing import assert_accurate, saved_tensors
from tests.ops.catalogue import mlp_inputs

raw = torch.ops.taut
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def rows_of_activations(activation, shape=(40, 130), dtype=torch.float32):
    *rows, width = shape
    gen = torch.Generator().manual_seed(0)
    u = torch.randn(*rows, 2 * width if ACTIVATIONS[activation][1] else width, generator=gen)
    return (2 * u).to(dtype), torch.randn(shape, generator=gen).to(dtype)


class KeepingActivation(Function):
    """The activation as others train it: its output is kept for the next linear.

    `bias` is in u already; its gradient is the sum that the backward pass of the activation makes.
    """

    @staticmethod
    def forward(ctx, u, bias, activation, *dropout):
        ctx.save_for_backward(u)
        ctx.arguments = activation, *dropout
        return raw.activation_fwd(u, activation, *dropout)

    @staticmethod
    def backward(ctx, da):
        du, _, db = raw.activation_bwd(da.contiguous(), *ctx.saved_tensors, *ctx.arguments)
        return du, db, *(None,) * len(ctx.arguments)


@every_activation
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_rebuilding_changes_no_bit(activation, p):
    inputs = mlp_inputs(torch.Generator().manual_seed(0), (70, 130), torch.float32, activation)
    x, w1, b1, w2, b2 = (t.requires_grad_() for t in inputs)
    dropout = ops.Dropout(p, 2**40, 1, 2)
    y = ops.mlp(x, w1, b1, w2, b2, activation=activation, dropout=dropout)
    u = ops.linear(x, w1, b1.detach())
    a = KeepingActivation.apply(u, b1, activation, *op_arguments("mlp", dropout, x))
    want = ops.linear(a, w2, b2)
    assert y.equal(want)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    got, kept = (torch.autograd.grad(z, inputs, dy) for z in (y, want))
    for name, one, other in zip(("x", "w1", "b1", "w2", "b2"), got, kept, strict=True):
        assert one.equal(other), f"gradient of {name}"


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_rebuilt_activation_is_that_of_the_forward_pass(activation, dtype, p):
    u, da = rows_of_activations(activation, dtype=dtype)
    arguments = op_arguments("mlp", ops.Dropout(p, 3), da)
    _, a, _ = raw.activation_bwd(da, u, activation, *arguments)
    assert a.equal(raw.activation_fwd(u, activation, *arguments))


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_of_rows_is_as_accurate_as_a_sum_of_its_own(activation, dtype):
    """It becomes the gradient of b1; 16-bit sums would stop growing."""
    u, da = rows_of_activations(activation, (3000, 8), dtype)
    du, _, total = raw.activation_bwd(da.abs(), u.abs(), activation, *NO_DROPOUT)
    assert total.dtype == torch.float32
    truth = du.double().sum(0)
    # a kernel may add what it has not yet rounded to 16 bits: 3000 roundings, of random sign
    rounding = du.double().abs().max() * torch.finfo(dtype).eps / 2 * math.sqrt(3000)
    plain = (du.float().sum(0) - truth).abs().max()
    ulp = truth.abs().max() * torch.finfo(torch.float32).eps
    assert (total - truth).abs().max() <= 2 * plain + ulp + (dtype != torch.float32) * rounding


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_the_input_and_the_pre_activation(activation, dtype):
    x, *parameters = mlp_inputs(torch.Generator().manual_seed(0), (20, 64), dtype, activation)
    parameters = [nn.Parameter(t) for t in parameters]
    width = parameters[0].shape[0]
    kept = saved_tensors(
        lambda x: ops.mlp(x, *parameters, activation=activation, dropout=ops.Dropout(0.1, 0)), x
    )
    assert [(t.shape, t.dtype) for t in kept] == [((20, 9), dtype), ((20, width), dtype)]


@every_activation
def test_dropout_acts_on_the_activations(activation):
    x, hidden = torch.rand(30, 9) + 1, 150
    w1 = torch.rand(2 * hidden if ACTIVATIONS[activation][1] else hidden, 9)
    d = ops.Dropout(0.3, 5, 6, 7, sample_ids=torch.arange(30) // 4, positions=torch.arange(30))
    y = ops.mlp(x, w1, None, torch.eye(hidden), None, activation=activation, dropout=d)
    keep = keep_mask((30, hidden), x.device, 0.3, 5, 6, 7, d.sample_ids, d.positions)
    assert (y != 0).equal(keep)
    whole = ops.mlp(x, w1, None, torch.eye(hidden), None, activation=activation)
    torch.testing.assert_close(y[keep], whole[keep] * keep_scale(0.3))


def test_erf_and_tanh_differ():
    """They are a silent swap away from each other."""
    u, _ = rows_of_activations("gelu")
    erf, tanh = (raw.activation_fwd(u, name, *NO_DROPOUT) for name in ("gelu", "gelu_tanh"))
    assert (erf - tanh).abs().max() > 1e-4
    torch.testing.assert_close(erf, F.gelu(u))
    torch.testing.assert_close(tanh, F.gelu(u, approximate="tanh"))


@pytest.mark.parametrize(("activation", "plain"), [("swiglu", F.silu), ("geglu", F.gelu)])
def test_the_gate_comes_first(activation, plain):
    u, _ = rows_of_activations(activation)
    gate, up = u[:, :130], u[:, 130:]
    a = raw.activation_fwd(u, activation, *NO_DROPOUT)
    torch.testing.assert_close(a, plain(gate) * up)


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activations_far_out(activation, dtype):
    """Where exp under- and overflows: no NaN, no number where the limit is zero."""
    far = torch.tensor([-6e4, -1e3, -100.0, -30.0, -0.0, 0.0, 30.0, 100.0, 1e3, 6e4], dtype=dtype)
    # the cube of tanh-GELU still fits, times itself it does not
    far = far if dtype == torch.float16 else torch.cat([far, far.new_tensor([-1e12, 1e12])])
    gated = ACTIVATIONS[activation][1]
    u = torch.cat([far, torch.ones_like(far)]) if gated else far
    u, ones = u.repeat(3, 1), torch.ones(3, len(far), dtype=dtype)
    leaf = u.double().requires_grad_()
    want = activate(leaf, activation)
    (want_du,) = torch.autograd.grad(want.sum(), leaf)
    a = raw.activation_fwd(u, activation, *NO_DROPOUT)
    du, again, _ = raw.activation_bwd(ones, u, activation, *NO_DROPOUT)
    eps = torch.finfo(dtype).eps
    # what an exp that ends above 0 leaves, 1e-38, times at most 1e12; the smallest fp16 is larger
    tiny = max(1e-24, torch.finfo(dtype).smallest_normal * eps)
    for got, truth in ((a, want.detach()), (again, want.detach()), (du, want_du)):
        torch.testing.assert_close(got.double(), truth, rtol=2 * eps, atol=tiny)


@every_activation
def test_a_nan_is_not_lost(activation):
    u, da = rows_of_activations(activation, (2, 40))
    u[0, 3] = u[1, 39] = math.nan
    a = raw.activation_fwd(u, activation, *NO_DROPOUT)
    assert a.isnan().nonzero().tolist() == [[0, 3], [1, 39]]
    _, again, _ = raw.activation_bwd(da, u, activation, *NO_DROPOUT)
    assert again.isnan().equal(a.isnan())


@pytest.mark.parametrize("lead", [(5,), (2, 3, 4), ()], ids=str)
def test_any_number_of_dimensions(lead):
    inputs = mlp_inputs(torch.Generator().manual_seed(0), (*lead, 70), torch.float32)
    assert_accurate(ops.mlp, mlp_reference, inputs)
