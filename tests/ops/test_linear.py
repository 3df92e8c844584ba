"""linear picks its GEMM once, adds weight gradients to a buffer, and sums rows losing none."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from taut import ops
from taut.ops.linear import Probe, linear_reference
from taut.testing import assert_accurate, saved_bytes, saved_tensors

module = sys.modules["taut.ops.linear"]  # the name in taut.ops is that of the function
raw = torch.ops.taut


def randn(*shape, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


@pytest.fixture
def _probe_anew():
    module.probe.cache_clear()
    yield
    module.probe.cache_clear()


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def _either_gemm(request, monkeypatch):
    monkeypatch.setattr(module, "probe", lambda: Probe(request.param, "chosen by the test"))


@pytest.mark.usefixtures("_either_gemm")
@pytest.mark.parametrize("lead", [(), (5,), (2, 3, 4), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_dimensions(lead, dtype):
    x, weight, bias = (randn(*s, dtype=dtype) for s in ((*lead, 7), (65, 7), (65,)))
    assert_accurate(ops.linear, linear_reference, (x, weight, bias))


@pytest.mark.usefixtures("_either_gemm")
def test_no_columns_out():
    assert_accurate(ops.linear, linear_reference, (randn(3, 7), randn(0, 7), randn(0)))


@pytest.mark.usefixtures("_either_gemm")
@pytest.mark.parametrize(
    ("dtype", "buffer_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_weight_gradients_add_up_in_the_buffer(dtype, buffer_dtype):
    x, weight, bias = (randn(*s, dtype=dtype) for s in ((6, 9), (5, 9), (5,)))
    x, weight, bias = (t.requires_grad_() for t in (x, weight, bias))
    buffer = torch.ones(5, 9, dtype=buffer_dtype)
    dys = [randn(6, 5, dtype=dtype, seed=seed) for seed in (1, 2)]
    for dy in dys:
        ops.linear(x, weight, bias, weight_grad=buffer).backward(dy)
    assert weight.grad is None
    truth = 1 + sum(dy.double().t() @ x.detach().double() for dy in dys)
    eps = max(torch.finfo(dtype).eps, torch.finfo(buffer_dtype).eps)
    # each of two products is rounded to dtype, each of two sums to that of the buffer
    torch.testing.assert_close(buffer.double(), truth, rtol=0, atol=2 * eps * truth.abs().max())
    want = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    for dy in dys:
        F.linear(*want).backward(dy)
    assert_same = torch.testing.assert_close
    assert_same(x.grad, want[0].grad)
    assert_same(bias.grad, want[2].grad)


def test_many_small_gradients_are_not_lost_in_an_fp32_buffer():
    """Added to 256, ones vanish in bf16: there the sum would stay where it is."""
    x, weight = torch.ones(1, 4, dtype=torch.bfloat16), torch.zeros(3, 4, dtype=torch.bfloat16)
    buffer = torch.full((3, 4), 256.0)
    for _ in range(50):
        ops.linear(x, weight.requires_grad_(), weight_grad=buffer).sum().backward()
    assert buffer.equal(torch.full((3, 4), 306.0))


def test_a_frozen_weight_leaves_its_buffer_alone():
    buffer = torch.zeros(3, 4)
    ops.linear(randn(2, 4).requires_grad_(), randn(3, 4), weight_grad=buffer).sum().backward()
    assert not buffer.any()


def test_one_buffer_serves_a_weight_used_twice():
    x, weight, buffer = randn(2, 4), randn(4, 4).requires_grad_(), torch.zeros(4, 4)
    y = ops.linear(ops.linear(x, weight, weight_grad=buffer), weight, weight_grad=buffer)
    y.sum().backward()
    F.linear(F.linear(x, weight), weight).sum().backward()
    torch.testing.assert_close(buffer, weight.grad)


def test_compiled_code_adds_to_the_buffer_too():
    x, weight, buffer = randn(2, 4), randn(3, 4).requires_grad_(), torch.zeros(3, 4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x, weight, buffer):
        return ops.linear(x, weight, weight_grad=buffer).square().sum()

    for _ in range(2):
        run(x, weight, buffer).backward()
    F.linear(x, weight).square().sum().backward()
    torch.testing.assert_close(buffer, 2 * weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_a_norm_keeps_nothing_of_its_own(dtype):
    x, weight = torch.randn(20, 30, dtype=dtype), torch.randn(10, 30, dtype=dtype)
    vectors = [torch.nn.Parameter(torch.randn(30)) for _ in range(2)]

    def run(x, weight):
        y, xhat = ops.dropout_add_norm(x, x, *vectors, return_xhat=True)
        assert not xhat.requires_grad
        return ops.linear(y, weight, normed=(xhat, *vectors))

    assert saved_bytes(run, x, torch.nn.Parameter(weight)) == x.nbytes + 4 * 20


def test_keeps_its_input():
    x, weight, bias = randn(20, 30), nn.Parameter(randn(10, 30)), nn.Parameter(randn(10))
    assert saved_bytes(ops.linear, x, weight, bias) == x.nbytes
    assert saved_bytes(ops.linear, x, weight, bias, weight_grad=torch.zeros(10, 30)) == x.nbytes
    assert [t.shape for t in saved_tensors(ops.linear, x, weight)] == [(20, 30)]


@pytest.mark.usefixtures("_probe_anew")
def test_probe_says_what_it_found_and_looks_once():
    found = module.probe()
    assert isinstance(found.use_onednn, bool)
    assert found.reason.endswith("oneDNN taken" if found.use_onednn else "MKL taken")
    assert module.probe() is found


@pytest.fixture
def _gemms_of_known_speed(request, monkeypatch):
    """oneDNN takes 1 second, MKL as many as the test says, for each of the three forms."""
    now = [0.0]
    num_calls = module._PROBE_ROUNDS + 1  # one more compares the results
    mkl_seconds = iter([s for s in request.param for _ in range(num_calls)])
    plain = F.linear

    def linear(x, weight, bias=None):
        now[0] += next(mkl_seconds)
        return plain(x, weight, bias)

    def onednn(x, weight, bias):
        now[0] += 1
        return plain(x, weight, bias)

    monkeypatch.setattr(module, "_onednn", onednn)
    monkeypatch.setattr(F, "linear", linear)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])


@pytest.mark.usefixtures("_probe_anew")
@pytest.mark.parametrize(
    ("_gemms_of_known_speed", "use_onednn", "shown"),
    [
        ((2, 3, 1.3), True, "forward 2.00x, dgrad 3.00x, wgrad 1.30x; oneDNN taken"),
        ((2, 1.2, 2), False, "forward 2.00x, dgrad 1.20x, wgrad 2.00x; MKL taken"),
        ((0.5, 2, 2), False, "forward 0.50x"),
    ],
    indirect=["_gemms_of_known_speed"],
)
def test_onednn_must_win_clearly_at_every_form(_gemms_of_known_speed, use_onednn, shown):
    found = module.probe()
    assert found.use_onednn is use_onednn
    assert shown in found.reason


@pytest.mark.usefixtures("_probe_anew")
def test_a_wrong_onednn_is_not_taken(monkeypatch):
    monkeypatch.setattr(module, "_onednn", lambda x, weight, bias: F.linear(x, weight) + 0.1)
    assert module.probe() == Probe(False, "oneDNN disagreed with F.linear in the probe")


@pytest.mark.usefixtures("_probe_anew")
def test_a_torch_without_the_internal_op_falls_back(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert module.probe() == Probe(False, "this torch has no mkldnn::_linear_pointwise")
    x, weight = randn(3, 7), randn(5, 7)
    assert_accurate(ops.linear, linear_reference, (x, weight))


@pytest.mark.usefixtures("_probe_anew")
def test_a_torch_without_onednn_falls_back(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert module.probe() == Probe(False, "this torch has no oneDNN")


@torch.no_grad()
def plain_sum(x):
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(100_000, 8), (20_000, 33), (1, 7), (0, 7)], ids=str)
def test_column_sums_of_many_rows(shape, dtype):
    x = 1 + randn(*shape, dtype=dtype)
    assert_accurate(torch.no_grad()(raw.column_sum), plain_sum, [x])
