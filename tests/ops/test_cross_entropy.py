"""cross_entropy on given logits: PyTorch's loss and fairseq's, and the gradient in their place."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from taut import ops
from taut.ops.cross_entropy import _composite, criterion, criterion_, cross_entropy_reference
from taut.testing import assert_accurate, saved_bytes
from tests.ops.samples import torch_samples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def classes(rows, num, ignored=True):
    targets = torch.randint(num, (rows,), generator=torch.Generator().manual_seed(1))
    if ignored:
        targets[1::4] = -100
    return targets


def with_gradient(loss_of, logits, dloss=None):
    leaf = logits.detach().clone().requires_grad_()
    loss = loss_of(leaf)
    (dlogits,) = torch.autograd.grad(loss, leaf, dloss)
    return loss.detach(), dlogits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("num_classes", [2, 1023, 1024, 1025, 5000])
def test_blocks_of_classes_and_their_rest(num_classes, reduction, dtype):
    logits, targets = 4 * randn(13, num_classes, dtype=dtype), classes(13, num_classes)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": reduction, "targets": targets}
    reference = partial(cross_entropy_reference, **options)
    if reduction == "none":
        assert_accurate(partial(ops.cross_entropy, **options), reference, [logits])
        return
    # a sum of 13 numbers, each of which may err by half an ulp of the largest
    loss, dlogits = with_gradient(partial(ops.cross_entropy, **options), logits)
    truth, _ = with_gradient(reference, logits.double())
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=0)
    rows = options | {"reduction": "none"}
    dloss = torch.ones(13) / ((targets != -100).sum() if reduction == "mean" else 1)
    _, by_row = with_gradient(partial(ops.cross_entropy, **rows), logits, dloss)
    assert dlogits.equal(by_row)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_classes", [1, 1023, 1024, 1025, 5000])
def test_loss_and_gradient_in_one_pass(num_classes, dtype):
    """As linear_cross_entropy has them made, over the logits."""
    logits, targets, drows = (
        4 * randn(13, num_classes, dtype=dtype),
        classes(13, num_classes),
        randn(13),
    )
    how = (-100, 0.9, 0.1 / num_classes, 1e-3)

    @torch.no_grad()
    def one_pass(logits, drows):
        grad = logits.clone()
        loss, _ = criterion_(grad, targets, drows, *how)
        return loss, grad

    @torch.no_grad()
    def composite(logits, drows):
        wide, grad = torch.promote_types(logits.dtype, torch.float32), torch.empty_like(logits)
        loss, stats = (logits.new_empty(n, dtype=wide) for n in ((13,), (13, 2)))
        correct = torch.empty(13, dtype=torch.bool)
        _composite(logits, targets, drows, grad, loss, stats, correct, *how)
        return loss, grad

    assert_accurate(one_pass, composite, [logits, drows])


def test_is_the_loss_of_pytorch():
    logits, targets = randn(2, 3, 50), classes(6, 50).view(2, 3)
    for reduction in ("sum", "mean"):
        for eps in (0.0, 0.3):
            options = {"reduction": reduction, "label_smoothing": eps}
            want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
            torch.testing.assert_close(ops.cross_entropy(logits, targets, **options), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_is_the_smoothing_of_fairseq(dtype):
    eps, num_classes = 0.1, 37
    logits, targets = randn(9, num_classes, dtype=dtype), classes(9, num_classes, ignored=False)

    def independent(logits):
        log_q = logits.log_softmax(-1)
        eps_i = eps / (num_classes - 1)
        nll = -log_q[torch.arange(9), targets]
        return ((1 - eps - eps_i) * nll - eps_i * log_q.sum(-1)).sum()

    form = partial(ops.cross_entropy, targets=targets, label_smoothing=eps)
    got = with_gradient(partial(form, smoothing="fairseq"), logits)
    want = with_gradient(independent, logits)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    # the two forms agree where PyTorch's eps is V / (V - 1) times fairseq's, and nowhere else
    as_torch = with_gradient(
        partial(form, label_smoothing=eps * num_classes / (num_classes - 1)), logits
    )
    torch.testing.assert_close(as_torch, want, rtol=1e-6, atol=1e-6)
    assert (with_gradient(form, logits)[0] - want[0]).abs() > 1e-3


def test_z_loss_adds_the_square_of_the_log_sum():
    logits, targets = 3 + randn(9, 37), classes(9, 37)
    added = 0.01 * logits.logsumexp(-1).square()[targets != -100].sum()
    plain, with_z = (ops.cross_entropy(logits, targets, z_loss=z) for z in (0.0, 0.01))
    torch.testing.assert_close(with_z - plain, added, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_a_common_offset_changes_no_bit(options, dtype):
    """Sixteenths: the sum with the offset is exact."""
    logits = (randn(9, 3000, dtype=dtype) * 16).round() / 16
    for offset in (1e4, -1e4):
        form = partial(ops.cross_entropy, targets=classes(9, 3000), **options)
        got, want = (with_gradient(form, z) for z in (logits + offset, logits))
        assert got[0].equal(want[0])
        assert got[1].equal(want[1])


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_no_target_at_all_costs_nothing(dtype, reduction):
    logits, targets = randn(5, 33, dtype=dtype), torch.full((5,), 7)
    form = partial(
        *(ops.cross_entropy,), targets=targets, ignore_index=7, reduction=reduction, z_loss=0.1
    )
    loss, dlogits = with_gradient(form, logits, torch.ones(5) if reduction == "none" else None)
    assert not loss.any()
    assert not dlogits.any()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_rows_tell_loss_and_guess(dtype):
    logits, targets = randn(40, 5, dtype=dtype), classes(40, 5)
    logits[:8], targets[:8] = 0, 3
    logits[:8, 1] = logits[:8, 3] = 1  # of equal logits the first is the guess
    shape = (4, 10)
    loss, rows = ops.cross_entropy(logits.view(*shape, 5), targets.view(shape), with_rows=True)
    want_loss, want = cross_entropy_reference(
        logits.view(*shape, 5), targets.view(shape), with_rows=True
    )
    torch.testing.assert_close(rows.loss, want.loss)
    torch.testing.assert_close(loss, want_loss)
    assert rows.correct.equal(want.correct)
    assert not rows.correct.flatten()[:8].any()
    assert rows.correct.any()
    assert not rows.loss[targets.view(shape) == -100].any()
    assert not rows.loss.requires_grad
    assert loss.equal(ops.cross_entropy(logits, targets))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1}], ids=str)
def test_infinite_logits_and_nan_are_those_of_pytorch(options):
    logits, targets = randn(6, 2100), classes(6, 2100, ignored=False)
    logits[1, :1500] = float("-inf")  # a block of the kernel has no finite logit
    targets[1] = 2000
    logits[2, targets[2]] = float("-inf")
    logits[3, 7] = float("inf")
    logits[4, 2099] = float("nan")
    logits[5] = float("-inf")
    ones, rows = torch.ones(6), options | {"targets": targets, "reduction": "none"}
    got, want = (
        with_gradient(partial(form, **rows), logits, ones)
        for form in (ops.cross_entropy, cross_entropy_reference)
    )
    torch.testing.assert_close(got, want, equal_nan=True)


def test_samples_of_pytorch():
    """Those with class numbers and without weights of classes, which are the second axis there."""
    samples = torch_samples("nn.functional.cross_entropy")
    count = 0
    for sample in samples:
        (targets,) = sample.args
        if targets.is_floating_point() or "weight" in sample.kwargs:
            continue
        options = {"reduction": "mean"} | sample.kwargs
        logits = sample.input.detach().movedim(1, -1)

        def plain(x, targets=targets, options=options):
            return F.cross_entropy(x.movedim(-1, 1), targets, **options)

        def head(x, targets=targets, options=options):
            return ops.linear_cross_entropy(x, torch.eye(x.shape[-1]), targets, **options)

        assert_accurate(partial(ops.cross_entropy, targets=targets, **options), plain, [logits])
        assert_accurate(head, plain, [logits])
        count += 1
    assert count == 8


def test_keeps_the_logits_and_eight_bytes_a_row():
    logits, targets = randn(20, 30), classes(20, 30)
    want = logits.nbytes + targets.nbytes + 8 * 20
    for in_place in (False, True):
        assert saved_bytes(ops.cross_entropy, logits, targets, in_place=in_place) == want


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_in_place_the_gradient_takes_the_place_of_the_logits(dtype):
    x, targets = randn(6, 2050, dtype=dtype).requires_grad_(), classes(6, 2050)
    (want,) = torch.autograd.grad(3 * ops.cross_entropy(x, targets), x)
    logits = x * 1
    before = logits.detach().clone()
    loss = ops.cross_entropy(logits, targets, in_place=True)
    assert logits.equal(before)
    (dx,) = torch.autograd.grad(3 * loss, logits)
    assert dx.equal(want)
    assert dx.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("is_same_loss", [False, True])
def test_a_second_use_of_overwritten_logits_raises(is_same_loss):
    x, targets = randn(6, 20).requires_grad_(), classes(6, 20)
    logits = x * 1
    loss = ops.cross_entropy(logits, targets, in_place=True)
    other = logits.square().sum()  # its backward pass needs the logits as they were
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss if is_same_loss else other).backward()


def test_logits_that_are_not_contiguous_are_not_overwritten():
    x, targets = randn(20, 6).requires_grad_(), classes(6, 20)
    logits = (x * 1).t()
    before = logits.detach().clone()
    ops.cross_entropy(logits, targets, in_place=True).backward()
    assert logits.equal(before)
    (want,) = torch.autograd.grad(ops.cross_entropy(x.t(), targets), x)
    assert x.grad.equal(want)


def test_compiled_code_may_overwrite_too():
    x, targets = randn(6, 20).requires_grad_(), classes(6, 20)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x):
        return ops.cross_entropy(x * 2, targets, in_place=True)

    (got,) = torch.autograd.grad(run(x), x)
    (want,) = torch.autograd.grad(ops.cross_entropy(x * 2, targets), x)
    assert got.equal(want)


@pytest.mark.parametrize("targets", [torch.tensor([0, 5]), torch.tensor([3, -1])], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_kernel_given_no_class_makes_the_loss_nan(targets, dtype):
    """Where a device is not waited for, nothing can be raised."""
    logits, (loss, stats) = randn(2, 5, dtype=dtype), (torch.zeros(n) for n in ((2,), (2, 2)))
    arguments = criterion("test", 5, 0.0, "torch", -100, 0.0, "sum")
    correct = torch.zeros(2, dtype=torch.bool)
    loss, stats = loss.to(dtype), stats.to(dtype)
    _composite(logits, targets, None, None, loss, stats, correct, *arguments)
    assert loss.isnan().tolist() == [False, True]
