"""Optimizers against torch.optim, against fp32 master copies, and in others' loops."""

import copy
import math

import pytest
import torch
from torch import nn

from taut.optim import SGD, Adam, AdamW, Lamb

SIZES = [(1,), (3,), (5120,), (7001,), (7168,), (17, 33), (0,)]
PAIRS = {
    "adamw": (AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw, no decay": (AdamW, torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.8, 0.9)}),
    "adam": (Adam, torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-3}),
    "sgd": (SGD, torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


def parameters(dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(size, generator=gen).to(dtype)) for size in SIZES]


def set_gradients(params, step, dtype=None):
    gen = torch.Generator().manual_seed(100 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=gen) * 10.0 ** (step % 3 - 1)
        p.grad = grad.to(dtype or p.dtype)


@pytest.mark.parametrize("pair", PAIRS)
def test_follows_torch(pair):
    ours, theirs, options = PAIRS[pair]
    params, wide = parameters(), [nn.Parameter(p.detach().double()) for p in parameters()]
    plain = parameters()
    runs = [ours(params, lr=0.01, **options), theirs(wide, lr=0.01, **options)]
    runs.append(theirs(plain, lr=0.01, **options))
    for step in range(50):
        for these, run in zip((params, wide, plain), runs, strict=True):
            set_gradients(plain, step)
            if these is not plain:
                for p, q in zip(these, plain, strict=True):
                    p.grad = q.grad.to(p.dtype)
            run.step()
    for p, truth, q in zip(params, wide, plain, strict=True):
        if p.numel():
            error, allowed = ((x.double() - truth).abs().max().item() for x in (p, q))
            assert error <= 2 * allowed + truth.abs().max().item() * 2**-23  # an ulp


@pytest.mark.parametrize("kind", [AdamW, Adam, Lamb, SGD])
def test_every_element_of_every_size_moves(kind):
    params, before = parameters(), parameters()
    set_gradients(params, 0)
    kind(params, lr=0.1).step()
    for p, q in zip(params, before, strict=True):
        assert (p != q).all()


def lamb_reference(params, grads, state, step, lr, betas, eps, decay):
    """You et al., 2020, in float64."""
    for p, g, s in zip(params, grads, state, strict=True):
        s[0] = betas[0] * s[0] + (1 - betas[0]) * g
        s[1] = betas[1] * s[1] + (1 - betas[1]) * g * g
        m, v = s[0] / (1 - betas[0] ** step), s[1] / (1 - betas[1] ** step)
        u = m / (v.sqrt() + eps) + decay * p
        norms = p.norm(), u.norm()
        ratio = norms[0] / norms[1] if min(norms) > 0 else 1.0
        p -= lr * ratio * u


def test_lamb_follows_its_formula():
    params = parameters()
    with torch.no_grad():
        params[1].zero_()  # a norm of 0: the factor is 1
    truth = [p.detach().double() for p in params]
    state = [[torch.zeros_like(p), torch.zeros_like(p)] for p in truth]
    optimizer = Lamb(params, lr=0.01, weight_decay=0.05, max_norm=None)
    for step in range(1, 51):
        set_gradients(params, step)
        grads = [p.grad.double() for p in params]
        lamb_reference(truth, grads, state, step, 0.01, (0.9, 0.999), 1e-6, 0.05)
        optimizer.step()
    for p, q in zip(params, truth, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [AdamW, Adam, Lamb, SGD])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16])
def test_16_bit_weights_take_the_steps_of_32_bit_ones(kind, grad_dtype):
    """Bit by bit: the weight and what is kept beside it are the fp32 number."""
    narrow = parameters(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in narrow]
    runs = [kind(params, lr=0.01, weight_decay=0.1) for params in (narrow, wide)]
    for step in range(60):
        set_gradients(narrow, step)
        for p, q in zip(wide, narrow, strict=True):
            p.grad = q.grad.float()
        for run in runs:
            run.step()
    for p, q in zip(narrow, wide, strict=True):
        if p.numel() == 0:
            continue
        low = runs[0].state[p]["remainder"]
        bits = (p.detach().view(torch.int16).int() << 16) + low
        assert bits.equal(q.detach().view(torch.int32))
        assert (p.float() - q).abs().max() <= q.abs().max() * 2**-8


def test_a_thousand_small_updates_are_not_lost():
    p = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    optimizer = SGD([p], lr=1e-4)
    for _ in range(1000):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert (p.float() - 0.900).abs().max() <= 0.002


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clips_by_the_global_norm(dtype):
    params = parameters(dtype)
    set_gradients(params, 1)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))
    plain = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer, other = SGD(params, lr=1.0, max_norm=3.0), SGD(plain, lr=1.0)
    for p, q in zip(plain, params, strict=True):
        p.grad = q.grad.clone()
    optimizer.step(grad_scale=0.5)
    assert optimizer.norm == pytest.approx(norm / 2, rel=1e-6)
    other.step(grad_scale=0.5 * 3.0 / (norm / 2 + 1e-6))
    assert all(p.equal(q) for p, q in zip(params, plain, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    params = parameters()
    optimizer = AdamW(params, max_norm=1.0)
    set_gradients(params, 0)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    params[3].grad[5000] = bad
    optimizer.step()
    assert optimizer.skipped == 1
    assert all(p.equal(q) for p, q in zip(params, before[1], strict=True))
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert value.equal(before[0]["state"][number][name])


def test_a_model_decays_its_matrices_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    optimizer = AdamW(model, lr=0.1, weight_decay=0.3)
    matrices, vectors = optimizer.param_groups
    assert [p.shape for p in matrices["params"]] == [(4, 4)]
    assert len(vectors["params"]) == 4
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_to_torch_and_back(dtype, tmp_path):
    params = parameters(dtype)
    optimizer = AdamW(params, lr=0.01)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    again = AdamW([nn.Parameter(p.detach().clone()) for p in params], lr=0.5)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    others = again.param_groups[0]["params"]
    assert again.param_groups[0]["lr"] == 0.01
    for run, these in ((optimizer, params), (again, others)):
        set_gradients(these, 7)
        run.step()
    assert all(p.equal(q) for p, q in zip(params, others, strict=True))
    for p, q in zip(params, others, strict=True):
        for name, value in optimizer.state[p].items():
            assert value.equal(again.state[q][name])
            assert value.dtype == again.state[q][name].dtype
    theirs = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in params])
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back = AdamW([nn.Parameter(p.detach().clone()) for p in params])
    back.load_state_dict(theirs.state_dict())
    if dtype == torch.float32:
        for run in (theirs, back):
            set_gradients(run.param_groups[0]["params"], 8)
            run.step()
        for p, q in zip(*(r.param_groups[0]["params"] for r in (theirs, back)), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_schedulers_absent_gradients_and_strides():
    params = parameters()[-3:-1]
    optimizer = AdamW(params, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = params[0].detach().clone()
    turned = torch.randn(33, 17).t()
    params[1].grad = turned
    optimizer.step()
    schedule.step()
    assert params[0].equal(before)
    assert not optimizer.state[params[0]]
    assert optimizer.param_groups[0]["lr"] == 0.5
    params[0].grad = torch.ones_like(params[0])
    params[1].grad = turned
    optimizer.step()  # the two are at different steps
    assert [int(optimizer.state[p]["step"]) for p in params] == [1, 2]


def test_a_kept_graph_notices_the_step():
    p = nn.Parameter(torch.ones(4))
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    SGD([p], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: AdamW(p, lr=-1.0), "lr must not be negative; got -1.0"),
        (lambda p: AdamW(p, betas=(0.9, 1.0)), r"betas must lie in \[0, 1\); got 1.0"),
        (lambda p: Lamb(p, max_norm=0.0), "max_norm must be positive; got 0.0"),
        (lambda p: SGD(p, nesterov=True), "nesterov needs one; got momentum=0.0"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make(parameters())
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="gradients must be dense; got sparse"):
        AdamW(sparse.parameters()).step()
