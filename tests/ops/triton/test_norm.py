import pytest
import torch
from torch import Tensor

from taut.ops.norm import _composite_bwd, _composite_fwd
from taut.ops.triton import norm as kernels
from taut.testing import assert_accurate
from tests.ops.triton.setting import DTYPES, coordinates, randn, without_grad

# Narrow and odd, around a block, several rows, a row over several warps, no rows.
SHAPES = [(1, 1), (7, 1), (1, 7), (7, 255), (7, 256), (2, 3, 300), (7, 4097), (0, 256), (2, 0, 5)]
WIDE = [(3, 8200), (2, 9000)]  # rows of more columns than a block holds

fwd, bwd = without_grad(kernels.norm_fwd), without_grad(kernels.norm_bwd)
composite_fwd, composite_bwd = without_grad(_composite_fwd), without_grad(_composite_bwd)


def forward_arguments(shape, dtype, p=0.1, is_rms=False, is_full=True, weights=None):
    """All optional arguments or none of them."""
    rows, width = torch.Size(shape[:-1]).numel(), shape[-1]
    vectors = [randn(width, dtype=weights or dtype, seed=seed) for seed in (1, 2, 3)]
    residual, *vectors = [randn(*shape, dtype=dtype, seed=4), *vectors] if is_full else [None] * 4
    x = 2 * randn(*shape, dtype=dtype) + 1
    return [x, residual, *vectors, 1e-5, is_rms, is_full, *coordinates(p, rows)]


def backward_arguments(shape, dtype, p=0.1, is_rms=False, is_full=True):
    x, residual, x_bias, weight, bias, *rest = forward_arguments(shape, dtype, p, is_rms, is_full)
    _, xhat, rstd, _ = composite_fwd(x, residual, x_bias, weight, bias, *rest)
    dy, dsum = (randn(*shape, dtype=dtype, seed=seed) for seed in (5, 6))
    flags = (is_rms, is_full, is_full, is_full)
    return [dy, dsum if is_full else None, xhat, rstd, weight, *flags, *rest[3:]]


def check(shape, dtype, **choices):
    assert_accurate(fwd, composite_fwd, forward_arguments(shape, dtype, **choices))
    assert_accurate(bwd, composite_bwd, backward_arguments(shape, dtype, **choices))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_composite(shape, dtype):
    check(shape, dtype)


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "bare"])
@pytest.mark.parametrize("is_rms", [True, False], ids=["rms", "layer"])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("shape", [(7, 300), *WIDE[:1]], ids=str)
def test_every_variant_matches_the_composite(shape, p, is_rms, is_full):
    check(shape, torch.float32, p=p, is_rms=is_rms, is_full=is_full)


@pytest.mark.parametrize("is_rms", [True, False], ids=["rms", "layer"])
@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_wide_rows_match_the_composite(shape, is_rms):
    check(shape, torch.bfloat16, is_rms=is_rms)


@pytest.mark.parametrize("name", ["residual", "x_bias", "weight", "bias"])
def test_each_operand_alone(name):
    arguments = forward_arguments((5, 70), torch.float32)
    for i, other in enumerate(("residual", "x_bias", "weight", "bias")):
        arguments[1 + i] = arguments[1 + i] if other == name else None
    assert_accurate(fwd, composite_fwd, arguments)


@pytest.mark.parametrize("flag", range(3), ids=["residual", "affine", "x_bias"])
def test_each_gradient_alone(flag):
    arguments = backward_arguments((5, 70), torch.float32)
    arguments[6:9] = [i == flag for i in range(3)]
    assert_accurate(bwd, composite_bwd, arguments)


def test_weights_of_another_dtype_and_stride():
    arguments = forward_arguments((5, 70), torch.bfloat16, weights=torch.float32)
    arguments[3] = torch.stack([arguments[3]] * 2, 1)[:, 0]
    arguments[4] = arguments[4].double()
    assert_accurate(fwd, composite_fwd, arguments)


def test_rows_of_large_mean_keep_their_variance():
    x = 1000 + randn(3, 200)
    assert_accurate(fwd, composite_fwd, [x, *forward_arguments((3, 200), x.dtype)[1:]])
    x = 1000 + randn(2, 8200)
    assert_accurate(fwd, composite_fwd, [x, *forward_arguments((2, 8200), x.dtype)[1:]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_plain_pytorch(dtype):
    """Forward and backward kernels in a row against autograd."""
    shape, eps, p = (9, 130), 1e-5, 0.1
    x, residual, x_bias, weight, bias, *_, ids, positions = forward_arguments(shape, dtype, p)
    drop = (p, 5, 6, 7, ids, positions)
    dy, dsum = (randn(*shape, dtype=dtype, seed=seed) for seed in (5, 6))

    def ours(x, residual, x_bias, weight, bias, dy, dsum) -> tuple[Tensor, ...]:
        y, xhat, rstd, z = fwd(x, residual, x_bias, weight, bias, eps, False, True, *drop)
        grads = bwd(dy, dsum, xhat, rstd, weight, False, True, True, True, *drop)
        return y, z, *(g.to(x.dtype) for g in grads)

    def plain(*inputs) -> tuple[Tensor, ...]:
        from taut.ops import Dropout
        from taut.ops.norm import dropout_add_norm_reference

        *inputs, dy, dsum = inputs
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in inputs]
            x, residual, x_bias, weight, bias = leaves
            outputs = dropout_add_norm_reference(
                x,
                residual,
                weight,
                bias,
                x_bias=x_bias,
                eps=eps,
                dropout=Dropout(*drop),
                return_sum=True,
            )
            dx, dresidual, dx_bias, dweight, dbias = torch.autograd.grad(
                outputs, leaves, (dy, dsum)
            )
        return *(t.detach() for t in outputs), dx, dresidual, dweight, dbias, dx_bias

    inputs = [x, residual, x_bias, weight, bias, dy, dsum]
    assert_accurate(without_grad(ours), without_grad(plain), inputs)


def test_column_sums_do_not_depend_on_chance():
    arguments = backward_arguments((150, 40), torch.float32)
    first, second = bwd(*arguments), bwd(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_more_rows_than_groups(monkeypatch):
    monkeypatch.setattr(kernels, "MAX_GROUPS", 3)
    monkeypatch.setattr(kernels, "MIN_STEPS", 1)
    for shape in ((50, 1030), (61, 100)):
        assert_accurate(bwd, composite_bwd, backward_arguments(shape, torch.float32))


def test_padding_is_not_read_and_not_written():
    """NaN beyond the last row and around a column block would reach a sum or a neighbour."""
    shape, room = (3, 65), 4
    arguments = forward_arguments(shape, torch.float32)
    want = fwd(*arguments)
    padded = [torch.full((room, *t.shape), float("nan")).to(t) for t in arguments[:2]]
    for buffer, t in zip(padded, arguments[:2], strict=True):
        buffer[0] = t
    got = fwd(*(b[0] for b in padded), *arguments[2:])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
