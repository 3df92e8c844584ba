import pytest
import torch

from taut.ops.cross_entropy import _composite, criterion
from taut.ops.triton import cross_entropy as kernels
from taut.testing import assert_accurate
from tests.ops.triton.setting import DEVICE, DTYPES, randn, without_grad

# One class, a row around a block, several blocks with and without a rest, no rows.
SHAPES = [(3, 1), (5, 33), (2, 4095), (2, 4097), (2, 8192), (2, 9000), (0, 7)]
VARIANTS = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "smoothing": "fairseq"},
    {"z_loss": 1e-2, "label_smoothing": 0.2},
]


def targets_of(rows, classes):
    targets = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1))
    targets[1::3] = -100
    return targets.to(DEVICE)


def run(kernel, logits, drows, *, targets, in_place=False, two_steps=False, **options):
    """Loss, correctness and gradient of each row; in one launch, or in one for each direction."""
    chosen = {"label_smoothing": 0.0, "smoothing": "torch", "z_loss": 0.0} | options
    arguments = criterion("test", logits.shape[1], ignore_index=-100, reduction="none", **chosen)
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows = logits.shape[0]
    logits = logits.clone()
    grad = logits if in_place else torch.full_like(logits, torch.nan)
    loss, stats = (
        logits.new_full((rows,), torch.nan, dtype=wide),
        logits.new_empty(rows, 2, dtype=wide),
    )
    correct = torch.ones(rows, dtype=torch.bool, device=logits.device)
    drows = drows.to(wide)
    if two_steps:
        kernel(logits, targets, None, None, loss, stats, correct, *arguments)
        kernel(logits, targets, drows, grad, None, stats, None, *arguments)
    else:
        kernel(logits, targets, drows, grad, loss, stats, correct, *arguments)
    return loss, correct.to(wide), grad


def check(shape, dtype, **options):
    rows, classes = shape
    inputs = (3 * randn(rows, classes, dtype=dtype), randn(rows, seed=2))
    ours, plain = (
        without_grad(lambda z, up, k=k, **o: run(k, z, up, **o))
        for k in (kernels.cross_entropy, _composite)
    )
    assert_accurate(ours, plain, inputs, targets=targets_of(rows, classes), **options)


@pytest.mark.parametrize("two_steps", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_composite(shape, dtype, two_steps):
    check(shape, dtype, two_steps=two_steps)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("two_steps", [False, True])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [(4, 300), (4, 5000)], ids=str)
def test_every_variant_matches_the_composite(shape, options, two_steps, in_place):
    check(shape, torch.float32, two_steps=two_steps, in_place=in_place, **options)


def test_the_first_of_equal_logits_is_the_guess():
    logits = torch.zeros(4, 5000, device=DEVICE)
    logits[:3, 10] = logits[:, 4500] = 1.0
    targets, up = torch.tensor([10, 4500, 0, 4500], device=DEVICE), torch.ones(4, device=DEVICE)
    _, correct, _ = run(kernels.cross_entropy, logits, up, targets=targets)
    assert correct.tolist() == [1, 0, 0, 1]


def test_a_target_that_is_no_class_makes_the_loss_nan():
    logits, targets = randn(4, 5000), torch.tensor([5000, -1, 3, -100], device=DEVICE)
    loss, _, _ = run(kernels.cross_entropy, logits, torch.ones(4, device=DEVICE), targets=targets)
    assert loss.isnan().tolist() == [True, True, False, False]


def test_minus_infinity_rules_a_class_out():
    """Also where a whole block is ruled out, before or after the others."""
    logits, targets = randn(2, 9000), torch.tensor([4097, 8999], device=DEVICE)
    logits[0, :4096] = logits[0, 8192:] = float("-inf")
    logits[1, :8190] = float("-inf")
    up = torch.ones(2, device=DEVICE)
    loss, _, grad = run(kernels.cross_entropy, logits, up, targets=targets)
    want, _, want_grad = run(_composite, logits.double(), up, targets=targets)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), want_grad, rtol=0, atol=1e-6)


def test_rows_may_lie_apart():
    room = torch.full((3, 320), torch.nan, device=DEVICE)
    logits = room[:, :300]
    logits.copy_(randn(3, 300))
    targets, up = targets_of(3, 300), torch.ones(3, device=DEVICE)
    want_loss, _, want = run(kernels.cross_entropy, logits.contiguous(), up, targets=targets)
    arguments = criterion("test", 300, 0.0, "torch", -100, 0.0, "none")
    loss, stats = torch.empty(3, device=DEVICE), torch.empty(3, 2, device=DEVICE)
    correct = torch.empty(3, dtype=torch.bool, device=DEVICE)
    kernels.cross_entropy(logits, targets, up, logits, loss, stats, correct, *arguments)
    assert logits.equal(want)
    assert loss.equal(want_loss)
    assert room[:, 300:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_gradients_are_multiplied_in_place(factor, dtype):
    """Of a part of a tensor, whose rest stays as it is."""
    x = torch.cat([randn(4099, dtype=dtype), torch.ones(5, device=DEVICE, dtype=dtype)])

    def ours(x):
        x = x.clone()
        kernels.scale_(x[:4099], torch.tensor(factor, device=DEVICE))
        return x

    def plain(x):
        return torch.cat([x[:4099] * factor, x[4099:]])

    assert_accurate(without_grad(ours), without_grad(plain), [x])
    if factor == 1:
        assert ours(x).equal(x)
