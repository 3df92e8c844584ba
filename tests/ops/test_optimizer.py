"""Steps of optimizers: the kernel against plain PyTorch, whose truth is in tests/optim."""

import pytest
import torch

from taut.ops import native
from taut.ops.optimizer import KINDS, global_norm, joined, optimizer_step, split

SIZES = [(1,), (3,), (16,), (5120,), (7001,), (17, 33), (0,), (40_000,)]


def test_a_weight_and_its_low_are_the_fp32_number():
    gen = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=gen).int()
    wide = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, 1.0, 1e-45, 3e38])])
    wide = wide[wide.isfinite() & (wide.abs() < 3.38e38)]  # the next bf16 would be infinite
    weight, low = split(wide)
    assert joined(weight, low).view(torch.int32).equal(wide.view(torch.int32))
    ulp = torch.maximum(wide.abs() * 2**-7, torch.tensor(2.0**-133))
    assert ((weight.float() - wide).abs() <= ulp / 2).all()


def lists(dtype, grad_dtype, steps=12):
    """Weights, their lows, first and second moments, and the gradients of each step."""
    gen = torch.Generator().manual_seed(0)

    def draw(scale=1.0):
        return [scale * torch.randn(size, generator=gen) for size in SIZES]

    weights = [w.to(dtype) for w in draw()]
    is_split = dtype == torch.bfloat16
    lows = [torch.zeros(w.shape, dtype=torch.int16) for w in weights] if is_split else None
    moments = [[torch.zeros(size) for size in SIZES] for _ in range(2)]
    return weights, lows, moments, [[g.to(grad_dtype) for g in draw(0.3)] for _ in range(steps)]


def run(kind, dtype, grad_dtype):
    weights, lows, (first, second), grads = lists(dtype, grad_dtype)
    for step, given in enumerate(grads, 1):
        betas = (0.9, 0.99)
        numbers = {"lr": 0.01, "betas": betas, "decay": 0.1, "step": step, "grad_scale": 0.5}
        nesterov = kind == "sgd"
        optimizer_step(
            kind, weights, lows, given, first, second, eps=1e-4, nesterov=nesterov, **numbers
        )
    lows = lows or [None] * len(weights)
    return [joined(w, low) for w, low in zip(weights, lows, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_takes_the_steps_of_plain_pytorch(kind, dtype, grad_dtype, monkeypatch):
    got = run(kind, dtype, grad_dtype)
    monkeypatch.setattr(native, "takes", lambda x: False)
    want = run(kind, dtype, grad_dtype)
    before = [w.float() for w in lists(dtype, grad_dtype)[0]]
    for a, b, c in zip(got, want, before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert (a != c).all()  # every element of every size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_is_that_of_all_as_one_vector(dtype):
    grads = [torch.randn(size).to(dtype) for size in SIZES]
    grads.append(torch.randn(33, 17).t().to(dtype))
    want = torch.cat([g.double().flatten() for g in grads]).norm().item()
    assert global_norm(grads) == pytest.approx(want, rel=1e-6)
    assert global_norm([]) == 0
    for bad in (torch.nan, torch.inf):
        grads[3][77] = bad
        assert not global_norm(grads) < torch.inf
