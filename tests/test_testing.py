"""The harness can fail: wrong results are refused, bytes counted once, bad ranks reported."""

import os
import time

import pytest
import torch
from torch import distributed
from torch.autograd import Function
from torch.nn import functional as F

from taut.testing import assert_accurate, run_distributed, saved_bytes, saved_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


class Altered(Function):
    """softplus, whose results in forward and backward can be spoiled."""

    @staticmethod
    def forward(ctx, x, in_output, in_gradient):
        ctx.save_for_backward(x)
        ctx.in_gradient = in_gradient
        return in_output(F.softplus(x))

    @staticmethod
    def backward(ctx, dy):
        return ctx.in_gradient(dy * torch.sigmoid(*ctx.saved_tensors)), None, None


def altered(in_output=lambda y: y, in_gradient=lambda dx: dx):
    return lambda x: Altered.apply(x, in_output, in_gradient)


def at(index, number):
    """A spoiler of one entry."""

    def spoil(x):
        x = x.clone()
        x[index] = number
        return x

    return spoil


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4)], ids=str)
def test_right_results_pass(shape, dtype):
    assert_accurate(altered(), F.softplus, [randn(*shape, dtype=dtype)])


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (altered(at((1, 2), 7.0)), r"output 0: error .*at \(1, 2\) got 7, truth 0"),
        (altered(at((1, 2), float("nan"))), r"output 0: error inf .*at \(1, 2\) got nan"),
        (altered(at((1, 2), float("inf"))), r"output 0: error inf .*at \(1, 2\) got inf"),
        (altered(lambda y: y.double()), r"output 0: .*torch.float32; got \(3, 4\) torch.float64"),
        (altered(lambda y: y.t()), r"output 0: .*\(3, 4\) torch.float32; got \(4, 3\)"),
        (altered(in_gradient=at((2, 0), 7.0)), r"gradient of input 0: error .*at \(2, 0\) got 7"),
        (
            altered(in_gradient=at((2, 0), float("nan"))),
            r"gradient of input 0: error inf .*got nan",
        ),
        (altered(in_gradient=lambda dx: None), "gives gradient of input 0; got nothing$"),
        (lambda x: F.softplus(x).detach(), "gives gradient of input 0; got nothing$"),
        (lambda x: (F.softplus(x), x), "gives output 0; got output 0, output 1$"),
    ],
)
def test_wrong_results_are_refused(form, message):
    with pytest.raises(AssertionError, match=message):
        assert_accurate(form, F.softplus, [randn(3, 4)], randn(3, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", [0, 1], ids=["output", "gradient"])
def test_the_bound_is_twice_the_error_of_plain_pytorch_and_one_ulp(dtype, where):
    # the truth is 1024: one ulp is 1024 eps there, and the reference errs by 10 of them
    ulp = 1024 * torch.finfo(dtype).eps

    class Biased(Function):
        @staticmethod
        def forward(ctx, x, ulps):
            ctx.ulps = ulps
            return x + ulps * ulp * (where == 0)

        @staticmethod
        def backward(ctx, dy):
            return dy + ctx.ulps * ulp * (where == 1), None

    def reference(x):
        return Biased.apply(x, 0 if x.dtype == torch.float64 else 10)

    x = torch.full((2, 2), 1024.0, dtype=dtype)
    for ulps in (21, -21):
        assert_accurate(lambda x, n=ulps: Biased.apply(x, n), reference, [x], x)
    for ulps in (22, -22):
        with pytest.raises(AssertionError, match=r"which is 2 x .* \(one ulp\)"):
            assert_accurate(lambda x, n=ulps: Biased.apply(x, n), reference, [x], x)
    assert_accurate(lambda x: Biased.apply(x, 31), reference, [x], x, factor=3)


def test_a_nan_of_the_truth_must_be_there():
    x = torch.tensor([[float("nan"), 1.0]])
    assert_accurate(altered(), F.softplus, [x])
    with pytest.raises(AssertionError, match=r"at \(0, 0\) got 0, truth nan"):
        assert_accurate(altered(at((0, 0), 0.0)), F.softplus, [x])


def test_a_reference_that_overflows_bounds_nothing():
    x = torch.full((2,), 300.0, dtype=torch.float16)
    with pytest.raises(AssertionError, match=r"the reference itself fails in torch\.float16"):
        assert_accurate(torch.square, torch.square, [x])


def test_strides_are_kept():
    seen = []

    def record(x, y):
        seen.append((x.stride(), y.stride()))
        return x * y

    x, y = randn(4, 6)[:, ::2], randn(3, 4).t()
    assert_accurate(record, torch.mul, [x, y], randn(4, 1).expand(4, 3))
    assert_accurate(record, torch.mul, [randn(3).expand(4, 3), y], torch.ones(1).expand(4, 3))
    assert seen == [((6, 2), (1, 4)), ((0, 1), (1, 4))]


def test_inputs_may_be_anything_and_are_left_alone():
    x, index = randn(4, 3), torch.tensor([2, 0])
    before = x.clone()

    def pick(x, index, nothing, *, scale):
        assert nothing is None
        return x.mul_(scale)[index] if x.requires_grad is False else x[index] * scale

    assert_accurate(pick, pick, [x, index, None], scale=3.0)
    assert x.equal(before)
    assert not x.requires_grad


def test_several_outputs_are_compared_each():
    def both(x):
        return x.exp(), x.cos()

    x, dy = randn(5), randn(5)
    assert_accurate(both, both, [x])
    assert_accurate(both, both, [x], (dy, dy))
    assert_accurate(both, both, [x], (None, dy))
    with pytest.raises(AssertionError, match="output 1: error"):
        assert_accurate(lambda x: (x.exp(), x.sin()), both, [x])
    with pytest.raises(AssertionError, match="2 outputs but 1 gradients of them"):
        assert_accurate(both, both, [x], dy)

    def detached(x):
        return x.exp(), x.cos().detach() + 0 * x

    assert_accurate(detached, detached, [x])
    with pytest.raises(AssertionError, match="gradient of input 0: error"):
        assert_accurate(detached, both, [x])
    assert_accurate(both, detached, [x], (dy, None))


def test_what_is_kept_is_listed_once():
    x = randn(8, 4)

    def form(x):
        return x.exp() * x[:, 1:] if x.shape[1] == 1 else (x.square() * x[:2].sum()).sin()

    # square keeps x, the product keeps the square and the sum, sin keeps the product
    shapes = [x.shape for x in saved_tensors(form, x)]
    assert sorted(shapes) == sorted([(8, 4), (8, 4), (), (8, 4)])
    assert saved_bytes(form, x) == 3 * x.nbytes + 4


def test_a_view_costs_the_storage_that_it_keeps_alive():
    big = randn(100, 10)
    assert saved_bytes(lambda x: x[3].exp().sum() + x[3].square().sum(), big) == big.nbytes + 40
    assert saved_bytes(lambda x: (x * big[0]).sum() + (x * big[1]).sum(), randn(10)) == big.nbytes


def test_parameters_are_not_counted():
    layer = torch.nn.Linear(4, 3)
    x = randn(5, 4)
    assert saved_bytes(layer, x) == x.nbytes
    assert saved_bytes(F.linear, x, layer.weight) == x.nbytes  # a transposed view of it is saved
    assert saved_bytes(F.linear, x, layer.weight.detach().clone()) == x.nbytes + 4 * 3 * 4
    assert saved_bytes(F.linear, x, layer.requires_grad_(False).weight) == 0
    assert saved_bytes(lambda x: x * layer.weight.detach()[0], x) == 0


def test_a_graph_that_is_gone_keeps_nothing():
    def form(x):
        x.exp().sum()
        return x.sigmoid()

    assert [x.shape for x in saved_tensors(form, randn(7))] == [(7,)]
    assert saved_tensors(lambda x: x.exp().detach(), randn(7)) == []
    assert saved_tensors(torch.no_grad()(torch.exp), randn(7)) == []


def test_what_a_custom_op_saves_is_seen():
    library = torch.library.Library("taut_test_testing", "DEF")  # gone at the end of the test
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        "taut_test_testing::double",
        lambda ctx, dy: 2 * dy,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
        lib=library,
    )
    x = randn(6, dtype=torch.float16)
    assert saved_bytes(torch.ops.taut_test_testing.double, x) == 24


def fails_on_rank_one(rank, world_size):
    if rank == 1:
        raise ValueError(f"rank {rank} of {world_size} is unwell")
    distributed.barrier()


def sums_ranks(rank, world_size, start):
    assert torch.get_num_threads() == 1
    total = torch.tensor([start + rank])
    distributed.all_reduce(total)
    assert total.item() == world_size * start + sum(range(world_size))


def dies_on_rank_zero(rank, world_size):
    if rank == 0:
        os._exit(3)
    distributed.barrier()


def hangs_on_rank_one(rank, world_size):
    time.sleep(600 * rank)


def test_ranks_can_talk():
    run_distributed(sums_ranks, 2, 10)


def test_a_failing_rank_is_reported_with_its_traceback():
    with pytest.raises(Exception, match=r"(?s)Process 1.*fails_on_rank_one.*rank 1 of 2 is unwell"):
        run_distributed(fails_on_rank_one, 2)


def test_a_dying_rank_is_reported():
    with pytest.raises(Exception, match=r"process 0 terminated with exit code 3"):
        run_distributed(dies_on_rank_zero, 2)


def test_a_hanging_rank_is_ended():
    with pytest.raises(TimeoutError, match=r"ranks \[.*1\] did not finish within 6 s"):
        run_distributed(hangs_on_rank_one, 2, timeout_s=6)
