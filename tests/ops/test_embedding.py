"""embedding: tables, norm and dropout in one pass; gradients of tables exact and repeatable."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from taut import PackedBatch, ops
from taut.ops.embedding import embedding_reference, sinusoids
from taut.ops.random import NO_DROPOUT, keep_mask
from taut.testing import assert_accurate, saved_bytes, saved_tensors
from tests.ops.catalogue import TABLES, embedding_inputs, make_ids, positional_tables
from tests.ops.samples import torch_samples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EMBEDDING = positional_tables(ops.embedding)
REFERENCE = positional_tables(embedding_reference)
NO_INDEX = (None,) * 4
raw = torch.ops.taut


def randn(*shape, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def randint(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def token_gradient(ids, weight, dy, **kwargs):
    weight = weight.detach().clone().requires_grad_()
    (dweight,) = torch.autograd.grad(ops.embedding(ids, weight, **kwargs), weight, dy)
    return dweight


def exact_sum(ids, dy, size, scale=1.0):
    """The gradient of a table in float64."""
    total = torch.zeros(size, dy.shape[-1], dtype=torch.float64)
    return total.index_add(0, ids.flatten(), dy.double().flatten(0, -2)) * scale


@pytest.mark.parametrize("num_left_out", range(4))
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_every_combination_of_tables(p, num_left_out):
    """Each is a path of its own through the kernels."""
    optional = {"position_weight": ("positions",), "type_weight": ("types",), "norm_weight": ()}
    for without in itertools.combinations(optional, num_left_out):
        gone = without + (("norm_bias",) if "norm_weight" in without else ())
        tables = embedding_inputs(
            torch.Generator().manual_seed(0),
            (30, 70),
            torch.float32,
            tuple(name for name in TABLES if name not in gone),
        )
        unused = {index for name in without for index in optional[name]}
        ids = {k: v for k, v in make_ids((30, 70), "cpu").items() if k not in unused}
        dropout = ops.Dropout(p, 3)
        assert_accurate(EMBEDDING, REFERENCE, tables, **ids, scale=3.0, dropout=dropout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("padding_idx", [0, 4, -1, -11])
@pytest.mark.parametrize("only", [TABLES[:1], TABLES], ids=["token", "all"])
def test_the_padding_row_gets_no_gradient(only, padding_idx, p, dtype):
    shape = (13, 40, 33)  # 520 rows of 11 ids: each has more than a chunk
    tables = embedding_inputs(torch.Generator().manual_seed(0), shape, dtype, only)
    names = ("ids",) if only == TABLES[:1] else ("ids", "positions", "types")
    ids = make_ids(shape, "cpu", names)
    kwargs = ids | {"padding_idx": padding_idx, "dropout": ops.Dropout(p, 1), "scale": 1.5}
    assert (ids["ids"] == padding_idx % 11).sum() > 1
    assert_accurate(EMBEDDING, REFERENCE, tables, **kwargs)
    leaves = [t if t is None else t.clone().requires_grad_() for t in tables]
    dweight, *_ = torch.autograd.grad(EMBEDDING(*leaves, **kwargs).sum(), leaves[0])
    assert (dweight != 0).any(1).equal(torch.arange(11) != padding_idx % 11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_token_repeated_ten_thousand_times_is_summed_exactly(dtype, p):
    """In 16 bits a sum stops growing after a few hundred rows."""
    rows = 10_000
    ids, dy = torch.full((rows,), 2), 1 + randn(rows, 24, dtype=dtype, seed=1) / 4
    weight, dropout = randn(4, 24, dtype=dtype), ops.Dropout(p, 1)
    keep = keep_mask(dy.shape, dy.device, p, 1, 0, 0) if p else torch.ones_like(dy)
    truth = exact_sum(ids, dy.double() * keep / (1 - round(p * 2**24) / 2**24), 4)
    half_ulp = torch.finfo(dtype).eps / 2

    def error(dweight):
        return ((dweight.double() - truth) / truth.abs().max()).abs().max()

    assert error(token_gradient(ids, weight, dy, dropout=dropout)) < half_ulp + 1e-5
    leaf = weight.clone().requires_grad_()
    scaled = (dy.double() * keep / (1 - p)).to(dtype)
    (naive,) = torch.autograd.grad(F.embedding(ids, leaf), leaf, scaled)
    assert error(naive) > 0.05  # so the bound does tell the two apart
    buffer = torch.zeros(4, 24)
    ops.embedding(ids, leaf, dropout=dropout, weight_grad=buffer).backward(dy)
    assert error(buffer) < 1e-6


def test_positions_and_types_that_repeat_are_summed_exactly_too():
    rows, dtype = 10_000, torch.bfloat16
    weight, position_weight, type_weight = (randn(n, 8, dtype=dtype) for n in (3, 5, 2))
    leaves = [t.requires_grad_() for t in (weight, position_weight, type_weight)]
    ids = [randint(n, rows, seed=n) for n in (3, 5, 2)]
    dy = 1 + randn(rows, 8, dtype=dtype, seed=1) / 4
    y = ops.embedding(
        ids[0],
        weight,
        positions=ids[1],
        position_weight=position_weight,
        types=ids[2],
        type_weight=type_weight,
    )
    for index, leaf, grad in zip(ids, leaves, torch.autograd.grad(y, leaves, dy), strict=True):
        truth = exact_sum(index, dy, leaf.shape[0])
        torch.testing.assert_close(grad.double(), truth, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 130, 5000])
def test_table_gradients_of_any_size(size, dtype):
    """Sizes around a block of rows; more bytes than a huge page holds; rows without a token."""
    width = 520 if size == 5000 else 17
    dz = randn(300, width, dtype=dtype)
    ids = torch.cat([randint(size, 200), torch.full((100,), size // 2)])
    for scale in (1.0, 2.5):
        got = raw.embedding_wgrad(dz, ids, size, torch.float32, scale, -1)
        torch.testing.assert_close(
            got.double(), exact_sum(ids, dz, size, scale), rtol=1e-6, atol=1e-5
        )
        assert (got != 0).any(1).equal(torch.bincount(ids, minlength=size) > 0)


@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 65, 1000])
@pytest.mark.parametrize("width", [1, 16, 70])
def test_sums_around_the_size_of_a_chunk(count, width):
    """Powers of two in fp32 add up without rounding: each row counts, and counts once."""
    ids = torch.tensor([1, 3]).repeat(count)
    dz = torch.ones(2 * count, width) * torch.tensor([1.0, 4.0]).repeat(count)[:, None]
    got = raw.embedding_wgrad(dz, ids, 5, torch.float32, 1.0, -1)
    want = torch.tensor([0.0, count, 0, 4 * count, 0])[:, None].expand(5, width)
    assert got.equal(want)


def test_no_rows_leave_a_table_of_zeros():
    weight = randn(100, 7)
    dweight = token_gradient(torch.empty(0, dtype=torch.int64), weight, torch.empty(0, 7))
    assert dweight.equal(torch.zeros(100, 7))


def test_a_table_without_rows():
    y = ops.embedding(torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 7, requires_grad=True))
    assert y.shape == (2, 0, 7)
    y.sum().backward()


@pytest.fixture
def _keep_num_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_keep_num_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_have_the_same_bits_every_time(dtype):
    """Few ids of very different counts, as in text, over one to three threads."""
    rows, width = 3000, 65
    ids = (300 * randn(rows).abs().exp2().reciprocal() ** 3).long().clamp(0, 299)
    tables = [randn(n, width, dtype=dtype).requires_grad_() for n in (300, 64, 2)]
    vectors = [randn(width).requires_grad_() for _ in range(2)]
    dy = randn(rows, width, dtype=dtype, seed=1)
    runs = []
    for num_threads in [2] * 240 + [1] * 5 + [3] * 5:
        torch.set_num_threads(num_threads)
        y = EMBEDDING(
            *tables,
            *vectors,
            ids=ids,
            positions=torch.arange(rows) % 64,
            types=(torch.arange(rows) > 1000).long(),
            dropout=ops.Dropout(0.1, 0),
        )
        runs.append([y, *torch.autograd.grad(y, tables + vectors, dy)])
    for run in runs[1:]:
        assert all(a.equal(b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("has_buffer", [False, True])
def test_a_weight_tied_to_the_head_gets_both_gradients(has_buffer):
    weight, ids = nn.Parameter(randn(11, 6)), randint(11, 20)
    buffer = torch.zeros(11, 6) if has_buffer else None
    x = ops.embedding(ids, weight, scale=2.0, weight_grad=buffer)
    ops.linear(x.tanh(), weight, weight_grad=buffer).square().sum().backward()
    got = buffer if has_buffer else weight.grad
    assert (weight.grad is None) == has_buffer
    want = weight.detach().clone().requires_grad_()
    F.linear((F.embedding(ids, want) * 2).tanh(), want).square().sum().backward()
    torch.testing.assert_close(got, want.grad)


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
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_gradients_add_up_in_the_buffer(dtype, buffer_dtype, p, is_transposed):
    ids, weight = randint(9, 500), randn(12, 33, dtype=dtype).requires_grad_()
    buffer = torch.ones(12, 33, dtype=buffer_dtype)
    buffer = buffer.t().contiguous().t() if is_transposed else buffer
    dys = [randn(500, 33, dtype=dtype, seed=seed) for seed in (1, 2)]
    dropout = ops.Dropout(p, 1)
    for dy in dys:
        y = ops.embedding(
            ids, weight, scale=0.5, padding_idx=3, dropout=dropout, weight_grad=buffer
        )
        y.backward(dy)
    assert weight.grad is None
    keep = keep_mask((500, 33), ids.device, p, 1, 0, 0) if p else torch.ones(500, 33)
    scale = 0.5 * (ids != 3)[:, None] * keep / (1 - p)
    terms = [dy.double() * scale for dy in dys]
    truth = 1 + sum(exact_sum(ids, t, 12) for t in terms)
    wide = torch.promote_types(dtype, torch.float32)
    plain = 1 + sum(torch.zeros(12, 33, dtype=wide).index_add(0, ids, t.to(wide)) for t in terms)
    # what summing row by row costs, twice, and two roundings to the dtype of the buffer
    bound = 2 * (plain - truth).abs().max() + 2 * torch.finfo(buffer_dtype).eps * truth.abs().max()
    torch.testing.assert_close(buffer.double(), truth, rtol=0, atol=bound.item())
    assert buffer[3].eq(1).all()
    assert buffer[9:].eq(1).all()


def test_a_frozen_weight_leaves_its_buffer_alone():
    buffer = torch.zeros(3, 4)
    positions = torch.arange(2)
    position_weight = randn(2, 4).requires_grad_()
    y = ops.embedding(
        randint(3, 2),
        randn(3, 4),
        positions=positions,
        position_weight=position_weight,
        weight_grad=buffer,
    )
    y.sum().backward()
    assert not buffer.any()
    assert position_weight.grad.equal(torch.ones(2, 4))


def test_compiled_code_adds_to_the_buffer_too():
    ids, weight, buffer = randint(5, 9), randn(5, 4).requires_grad_(), torch.zeros(5, 4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(ids, weight, buffer):
        return ops.embedding(ids, weight, weight_grad=buffer).square().sum()

    for _ in range(2):
        run(ids, weight, buffer).backward()
    F.embedding(ids, weight).square().sum().backward()
    torch.testing.assert_close(buffer, 2 * weight.grad)


@pytest.mark.parametrize("width", [1, 2, 7, 512])
def test_sinusoids_are_the_formula_rounded_once(width):
    table = sinusoids(3000, width, torch.float32, torch.device("cpu"))
    for position, column in itertools.product((0, 1, 2, 499, 2999), range(width)):
        angle = position / 10000 ** (2 * (column // 2) / width)
        truth = math.cos(angle) if column % 2 else math.sin(angle)
        assert abs(table[position, column].item() - truth) <= 2.0**-24 * abs(truth) + 1e-12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinusoidal_positions_are_added_in_fp32(dtype):
    ids, positions, weight = randint(9, 50), randint(4096, 50), randn(9, 40, dtype=dtype)
    y = ops.embedding(ids, weight, scale=3.0, positions=positions, sinusoidal=4096)
    table = sinusoids(4096, 40, torch.float64, torch.device("cpu"))
    truth = 3 * weight.double()[ids] + table[positions]
    half_ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(y.double(), truth, rtol=half_ulp * (1 + 1e-6), atol=4e-7)


def test_positions_are_counted_in_each_sequence():
    sequences = [torch.arange(n) % 7 for n in (1, 7, 64, 0, 33)]
    batch = PackedBatch.from_sequences(sequences)
    weight, position_weight = randn(7, 10), randn(64, 10)
    counted = ops.embedding(
        batch.tokens, weight, cu_seqlens=batch.cu_seqlens, position_weight=position_weight
    )
    given = ops.embedding(
        batch.tokens, weight, positions=batch.positions, position_weight=position_weight
    )
    assert counted.equal(given)
    alone = [
        ops.embedding(s, weight, positions=torch.arange(len(s)), position_weight=position_weight)
        for s in sequences
    ]
    assert counted.equal(torch.cat(alone))
    starts_empty = torch.tensor([0, 0, 3, 3], dtype=torch.int32)
    assert raw.count_positions(starts_empty, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_mask_is_the_documented_one_both_ways(has_norm, dtype):
    """The dropout comes last: what it drops is zero, the bias of the norm too."""
    shape = (30, 300)
    tables = [t.abs() + 1 for t in embedding_inputs(torch.Generator().manual_seed(0), shape, dtype)]
    tables = [*tables[:3], *(tables[3:] if has_norm else (None, None))]
    if has_norm:
        tables[4] += 100
    d = ops.Dropout(0.3, 2**40, 5, 6, sample_ids=torch.arange(30) // 7, positions=torch.arange(30))
    ids = make_ids(shape, "cpu")
    keep = keep_mask(shape, torch.device("cpu"), 0.3, 2**40, 5, 6, d.sample_ids, d.positions)
    y = EMBEDDING(*tables, **ids, dropout=d)
    assert (y != 0).equal(keep)
    undropped = EMBEDDING(*tables, **ids)[keep]
    torch.testing.assert_close(y[keep], undropped / 0.7, rtol=2 * torch.finfo(dtype).eps, atol=0)
    if not has_norm:
        dy = torch.ones(shape, dtype=dtype)
        dweight = token_gradient(torch.arange(30), randn(30, 300, dtype=dtype), dy, dropout=d)
        assert (dweight != 0).equal(keep)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_ids_and_with_a_norm_x_hat(dtype):
    shape = (20, 30)
    tables = embedding_inputs(torch.Generator().manual_seed(0), shape, dtype)
    weight, *tables = (nn.Parameter(t) for t in tables)
    ids, positions, types = make_ids(shape, "cpu").values()
    dropout = ops.Dropout(0.1, 0)
    assert saved_bytes(ops.embedding, ids, weight, dropout=dropout) == 8 * 20
    given = dict(zip(TABLES[1:], tables, strict=True))
    several = partial(ops.embedding, positions=positions, types=types, dropout=dropout)
    no_norm = {name: given[name] for name in ("position_weight", "type_weight")}
    assert saved_bytes(several, ids, weight, **no_norm) == 3 * 8 * 20
    kept = saved_tensors(several, ids, weight, **given)
    assert [(t.shape, t.dtype) for t in kept[3:]] == [((20, 30), dtype), ((20,), torch.float32)]
    assert sum(t.num_bytes for t in kept) == 3 * 8 * 20 + 20 * 30 * weight.element_size() + 4 * 20


def test_variance_survives_a_large_mean():
    weight = 1000 + randn(40, 300)
    vectors = (torch.ones(300), None)
    _, _, rstd = raw.embedding_fwd(
        torch.arange(40), weight, *NO_INDEX, *vectors, None, 1.0, 0, -1, 0.0, *NO_DROPOUT
    )
    truth = weight.double().var(-1, correction=0)
    assert ((rstd.double() ** -2 - truth) / truth).abs().max() < 1e-4


def test_ids_may_be_int32_and_of_any_layout():
    ids, weight = randint(9, 6, 10), randn(9, 5)
    want = ops.embedding(ids, weight)
    assert ops.embedding(ids.int(), weight).equal(want)
    assert ops.embedding(ids.t().contiguous().t(), weight).equal(want)
    assert ops.embedding(ids[:, ::2], weight).equal(want[:, ::2])
    types = randint(2, 6, 10, seed=1)
    got, want = (
        ops.embedding(ids, weight, types=t, type_weight=weight[:2]) for t in (types.int(), types)
    )
    assert got.equal(want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_takes_the_samples_of_pytorch(dtype):
    unknown = {"max_norm", "norm_type", "scale_grad_by_freq", "sparse"}
    num_taken = 0
    for sample in torch_samples("nn.functional.embedding", dtype):
        (ids,) = sample.args
        if unknown & sample.kwargs.keys():
            with pytest.raises(TypeError, match="unexpected keyword"):
                ops.embedding(ids, sample.input, **sample.kwargs)
            continue
        num_taken += 1
        assert_accurate(EMBEDDING, REFERENCE, [sample.input, *NO_INDEX], ids=ids, **sample.kwargs)
        y = ops.embedding(ids, sample.input, **sample.kwargs)
        assert y.equal(F.embedding(ids, sample.input, **sample.kwargs))
    assert num_taken == 5  # of ten
