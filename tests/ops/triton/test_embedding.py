import pytest
import torch

from taut.ops.embedding import _composite_bwd, _composite_fwd, _composite_wgrad, sinusoids
from taut.ops.triton import embedding as kernels
from taut.testing import assert_accurate
from tests.ops.triton.setting import DEVICE, DTYPES, coordinates, randn, without_grad

# Narrow and odd, around a block, several rows, a row over several warps, no rows.
# two columns, whose norm has gradient 0 and so no bound of this kind, have a test of their own
SHAPES = [(1, 3), (7, 7), (7, 255), (7, 256), (2, 3, 300), (3, 4097), (0, 256), (2, 0, 5)]
WIDE = (3, 8200)  # more columns than a block holds
SIZES = (11, 7, 2)  # of the tables

fwd, bwd = without_grad(kernels.embedding_fwd), without_grad(kernels.embedding_bwd)
composite_fwd, composite_bwd = without_grad(_composite_fwd), without_grad(_composite_bwd)


def randint(high, *shape, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=gen).to(DEVICE)


def forward_arguments(shape, dtype, p=0.1, has_tables=True, has_norm=True, has_sinusoids=False):
    width, rows = shape[-1], torch.Size(shape[:-1]).numel()
    weight, position_weight, type_weight = (randn(n, width, dtype=dtype, seed=n) for n in SIZES)
    if has_sinusoids:
        position_weight = sinusoids(SIZES[1], width, torch.float32, torch.device(DEVICE))
    tables = [randint(SIZES[0], *shape[:-1]), weight]
    tables += [randint(SIZES[1], *shape[:-1], seed=1), position_weight]
    tables += [randint(SIZES[2], *shape[:-1], seed=2), type_weight]
    tables = tables if has_tables else [*tables[:2], None, None, None, None]
    vectors = [randn(width, dtype=dtype, seed=s) for s in (4, 5)] if has_norm else [None, None]
    return [*tables, *vectors, 3.0, 1e-5, *coordinates(p, rows)]


def backward_arguments(shape, dtype, p=0.1, has_norm=True):
    arguments = forward_arguments(shape, dtype, p, has_norm=has_norm)
    _, xhat, rstd = composite_fwd(*arguments)
    dy = randn(*shape, dtype=dtype, seed=6)
    kept = (xhat, rstd, arguments[6]) if has_norm else (None, None, None)
    return [dy, *kept, has_norm, *arguments[10:]]


def check(shape, dtype, **choices):
    assert_accurate(fwd, composite_fwd, forward_arguments(shape, dtype, **choices))
    choices = {name: value for name, value in choices.items() if name in ("p", "has_norm")}
    assert_accurate(bwd, composite_bwd, backward_arguments(shape, dtype, **choices))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_composite(shape, dtype):
    check(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_through_a_norm_of_two_columns_is_rounding(dtype):
    """But for eps it is 0: what is left of its terms is mostly their rounding."""
    assert_accurate(fwd, composite_fwd, forward_arguments((9, 2), dtype))
    arguments = backward_arguments((9, 2), dtype, p=0.0)
    dy, _, rstd, weight = arguments[:4]
    terms = dy.float().abs().max() * weight.float().abs().max() * rstd.max()
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in arguments]
    error = (bwd(*arguments)[0].double() - composite_bwd(*wide)[0]).abs().max()
    assert error <= 2**-20 * terms


@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("has_tables", [True, False], ids=["tables", "token alone"])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("shape", [(7, 300), WIDE], ids=str)
def test_every_variant_matches_the_composite(shape, p, has_tables, has_norm):
    check(shape, torch.float32, p=p, has_tables=has_tables, has_norm=has_norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows_match_the_composite(dtype):
    check(WIDE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinusoids_stay_in_fp32(dtype):
    arguments = forward_arguments((9, 130), dtype, has_norm=False, has_sinusoids=True)
    assert_accurate(fwd, composite_fwd, arguments)


def test_vectors_of_another_dtype_and_stride():
    arguments = forward_arguments((5, 70), torch.bfloat16)
    arguments[6] = torch.stack([arguments[6].float()] * 2, 1)[:, 0]
    arguments[7] = None
    assert_accurate(fwd, composite_fwd, arguments)


@pytest.mark.skipif(DEVICE == "cuda", reason="a device-side assertion ends CUDA in this process")
@pytest.mark.parametrize("table", range(3), ids=["ids", "positions", "types"])
@pytest.mark.parametrize("bad", [-1, "size", 2**40])
def test_an_index_outside_is_not_read(table, bad):
    arguments = forward_arguments((5, 70), torch.float32)
    arguments[2 * table][3] = SIZES[table] if bad == "size" else bad
    with pytest.raises(RuntimeError, match="must lie in the rows of their tables"):
        fwd(*arguments)


def table_gradient(ids, dz, size, dtype=torch.float32, scale=2.0, padding_idx=-1):
    out = dz.new_zeros(size, dz.shape[-1], dtype=dtype)
    without_grad(kernels.embedding_wgrad)(out, dz, ids, scale, padding_idx)
    return out


def exact_table_gradient(ids, dz, size, scale=2.0, padding_idx=-1):
    dz = scale * dz.double() * (ids != padding_idx)[:, None]
    return torch.zeros(size, dz.shape[-1], dtype=torch.float64, device=DEVICE).index_add(0, ids, dz)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 5, 40, 3000])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 97, 200])
def test_table_gradients(rows, size, dtype):
    """Few ids span chunks, many share one."""
    ids, dz = randint(size, rows), randn(rows, 9, dtype=dtype)
    got = table_gradient(ids, dz, size)
    want = exact_table_gradient(ids, dz, size)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)
    got = table_gradient(ids, dz, size, dtype, padding_idx=0)
    want = exact_table_gradient(ids, dz, size, padding_idx=0)
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert not got[0].any()


@pytest.mark.parametrize("counts", [(32, 32), (31, 33, 1), (1, 95), (64, 1, 63), (5, 90, 40, 2)])
@pytest.mark.parametrize("width", [1, 256, 300])
def test_sums_that_begin_and_end_anywhere_in_a_chunk(counts, width):
    """Small integers add up without rounding: each row counts, and counts once."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(DEVICE)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    dz = torch.ones(len(ids), width, device=DEVICE)
    got = table_gradient(ids[order], dz, len(counts) + 1, scale=1.0)
    want = torch.tensor([*counts, 0.0], device=DEVICE)[:, None].expand(-1, width)
    assert got.equal(want)


def test_a_frequent_id_has_more_chunks_than_are_joined_at_once():
    rows = kernels.CHUNK * (2 * kernels.JOINED + 3) + 5
    ids = torch.ones(rows, dtype=torch.int64, device=DEVICE)
    ids[::50] = 0
    dz = randn(rows, 3, dtype=torch.bfloat16)
    got = table_gradient(ids, dz, 3)
    want = exact_table_gradient(ids, dz, 3)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-4)
    assert got.equal(table_gradient(ids, dz, 3))


def test_table_gradients_are_added_to_what_is_there():
    ids, dz = randint(4, 100), randn(100, 20)
    out = torch.ones(6, 20, device=DEVICE)
    kernels.embedding_wgrad(out, dz, ids, 2.0, -1)
    want = 1 + exact_table_gradient(ids, dz, 6)
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-5)
    assert out[4:].eq(1).all()


def test_matches_the_composite_gradient_of_a_table():
    ids, dz = randint(9, 70), randn(70, 40)
    want = without_grad(_composite_wgrad)(dz, ids, 9, torch.float32, 2.0, 3)
    torch.testing.assert_close(table_gradient(ids, dz, 9, padding_idx=3), want)


def test_sums_do_not_depend_on_chance():
    arguments = backward_arguments((150, 40), torch.float32)
    first, second = bwd(*arguments), bwd(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
