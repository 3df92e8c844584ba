"""linear_cross_entropy: three GEMMs, a chunk of logits at a time, and no row without a target."""

import sys
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from taut import ops
from taut.ops import native
from taut.ops.linear import Probe
from taut.ops.linear_cross_entropy import chunk_rows, linear_cross_entropy_reference
from taut.testing import assert_accurate, saved_bytes

module = sys.modules["taut.ops.linear_cross_entropy"]  # the name in taut.ops is the function's
linear = sys.modules["taut.ops.linear"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["sum", "mean", "none"]
ROWS = 64


def randn(*shape, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def inputs(rows, width, classes, dtype=torch.float32, ignored=True):
    """x, weight, bias and targets, a quarter of them ignored."""
    x, weight = randn(rows, width, dtype=dtype), randn(classes, width, dtype=dtype, seed=1)
    targets = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1))
    if ignored:
        targets[1::4] = -100
    return x, (2 * weight / width**0.5).to(dtype), randn(classes, dtype=dtype, seed=2), targets


def of_tensors(form, targets, **options):
    """Of x, weight and bias alone."""
    return lambda x, weight, bias=None: form(x, weight, targets, bias, **options)


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def _either_gemm(request, monkeypatch):
    monkeypatch.setattr(linear, "probe", lambda: Probe(request.param, "chosen by the test"))


@pytest.fixture
def _small_chunks(monkeypatch):
    monkeypatch.setattr(module, "chunk_rows", lambda *_: ROWS)
    monkeypatch.setattr(module, "_WGRAD_BLOCK", 256)
    monkeypatch.setattr(module, "_DGRAD_BLOCK", 256)


@pytest.mark.usefixtures("_small_chunks", "_either_gemm")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [ROWS, 2 * ROWS, 3 * ROWS, 5 * ROWS + 3])
def test_chunks_of_rows_and_blocks_of_classes(rows, reduction, dtype):
    """One chunk, two whose sum needs no lower half, more, and a rest; 601 classes."""
    *tensors, targets = inputs(rows, 33, 601, dtype, ignored=rows != 3 * ROWS)
    forms = (
        of_tensors(form, targets, reduction=reduction, label_smoothing=0.1, z_loss=1e-3)
        for form in (ops.linear_cross_entropy, linear_cross_entropy_reference)
    )
    if reduction == "none":
        dy = randn(rows, seed=3)
        dy[::5] = 0  # rows that the caller leaves out
        assert_accurate(*forms, tensors, dy)
    else:
        # a sum may be exact by luck, so it bounds nothing: here it is left out, and looked at below
        def gradients_alone(form):
            return lambda *tensors: (loss := form(*tensors)) - loss.detach()

        assert_accurate(*map(gradients_alone, forms), tensors, torch.tensor(1.7))


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_sum_and_mean_follow_from_the_rows(dtype):
    x, weight, bias, targets = inputs(5 * ROWS, 33, 601, dtype)
    form = of_tensors(partial(ops.linear_cross_entropy, with_rows=True), targets)
    total, rows = form(x, weight, bias)
    want, want_rows = linear_cross_entropy_reference(x, weight, targets, bias, with_rows=True)
    torch.testing.assert_close(rows.loss, want_rows.loss)
    torch.testing.assert_close(total, want)
    assert rows.correct.equal(want_rows.correct)
    assert total.equal(rows.loss.double().sum().to(total.dtype))
    mean = ops.linear_cross_entropy(x, weight, targets, bias, reduction="mean")
    assert mean.equal((rows.loss.double().sum() / (targets != -100).sum()).to(total.dtype))
    assert rows.loss.equal(ops.linear_cross_entropy(x, weight, targets, bias, reduction="none"))
    shaped, its_rows = ops.linear_cross_entropy(
        x.view(5, ROWS, 33), weight, targets.view(5, ROWS), bias, with_rows=True, reduction="none"
    )
    assert shaped.equal(rows.loss.view(5, ROWS))
    assert its_rows.correct.shape == its_rows.loss.shape == (5, ROWS)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_is_the_loss_of_pytorch(reduction):
    x, weight, bias, targets = inputs(3 * ROWS, 33, 601)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    dloss = randn(3 * ROWS, seed=3) if reduction == "none" else torch.tensor(0.3)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    got = ops.linear_cross_entropy(x, weight, targets, bias, **options)
    want = F.cross_entropy(F.linear(x, weight, bias), targets, **options)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, leaves, dloss) for loss in (got, want)), rtol=1e-5, atol=1e-5
    )


class Gemms:
    """The GEMMs that ran: their forms, and the rows of logits that each had."""

    def __init__(self, monkeypatch):
        self.rows = {"forward": 0, "dgrad": 0, "wgrad": 0}
        shape_of = {
            "forward": lambda x, *_: x,
            "dgrad": lambda dz, _: dz,
            "wgrad": lambda dz, _: dz,
        }
        for name, of in shape_of.items():
            monkeypatch.setattr(module, name, self.counting(name, getattr(module, name), of))

    def counting(self, name, form, of):
        def run(*args):
            # a part of the columns counts as that part of the rows
            share = 1 if name == "forward" else of(*args).shape[1] / 601
            self.rows[name] += round(of(*args).shape[0] * share, 6)
            return form(*args)

        return run


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize(
    ("reduction", "wanted", "want"),
    [
        ("sum", (), (1, 0, 0)),
        ("sum", ("x", "weight", "bias"), (1, 1, 1)),
        ("mean", ("x",), (1, 1, 0)),
        ("mean", ("weight",), (1, 0, 1)),
        ("sum", ("bias",), (1, 0, 0)),
        ("none", (), (1, 0, 0)),
        ("none", ("x", "weight"), (2, 1, 1)),
        ("none", ("weight",), (2, 0, 1)),
    ],
    ids=str,
)
def test_only_what_is_asked_for_is_computed(reduction, wanted, want, monkeypatch):
    """Rows without a target are in no GEMM."""
    *tensors, targets = inputs(4 * ROWS, 33, 601)
    for name, t in zip(("x", "weight", "bias"), tensors, strict=True):
        t.requires_grad_(name in wanted)
    gemms = Gemms(monkeypatch)
    loss = of_tensors(ops.linear_cross_entropy, targets, reduction=reduction)(*tensors)
    if wanted:
        loss.sum().backward()
    num_rows = int((targets != -100).sum())
    assert num_rows == 3 * ROWS
    assert [round(n) for n in gemms.rows.values()] == [num_rows * n for n in want]
    assert [t.grad is not None for t in tensors] == [
        name in wanted for name in ("x", "weight", "bias")
    ]
    with torch.no_grad():
        before = dict(gemms.rows)
        of_tensors(ops.linear_cross_entropy, targets, reduction=reduction)(*tensors)
    assert gemms.rows["dgrad"] == before["dgrad"]
    assert gemms.rows["wgrad"] == before["wgrad"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [0, 9])
def test_no_target_at_all_costs_nothing(rows, dtype, reduction, monkeypatch):
    *tensors, _ = inputs(rows, 33, 601, dtype)
    leaves = [t.requires_grad_() for t in tensors]
    gemms = Gemms(monkeypatch)
    targets = torch.full((rows,), -100)
    loss = of_tensors(ops.linear_cross_entropy, targets, reduction=reduction, z_loss=0.1)(*leaves)
    loss.sum().backward()
    assert not loss.any()
    assert not any(t.grad.any() for t in leaves)
    assert not any(gemms.rows.values())


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_an_ignored_row_moves_no_other_by_a_bit(dtype):
    x, weight, bias, targets = inputs(3 * ROWS, 33, 601, dtype)

    def run(x, targets):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        loss = of_tensors(ops.linear_cross_entropy, targets)(*leaves)
        return loss, torch.autograd.grad(loss, leaves)

    kept = targets != -100
    loss, (dx, *parameters) = run(torch.where(kept[:, None], x, torch.nan), targets)
    alone, (dx_alone, *parameters_alone) = run(x[kept], targets[kept])
    assert loss.equal(alone)
    assert dx[kept].equal(dx_alone)
    assert not dx[~kept].any()
    assert all(a.equal(b) for a, b in zip(parameters, parameters_alone, strict=True))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_a_common_offset_of_the_logits_costs_no_digits(options):
    """Sixteenths: what the GEMM adds is exact."""
    x, weight, bias, targets = inputs(20, 8, 601)
    x, weight, bias = ((t * 4).round() / 4 for t in (x, weight, bias))
    form = of_tensors(ops.linear_cross_entropy, targets, **options)
    got, want = (form(x, weight, bias + offset) for offset in (1e4, 0))
    assert got.equal(want)


def test_many_small_gradients_are_not_lost(monkeypatch):
    """Of two equal logits each row gives half of x. Added to 256, 1 vanishes in bfloat16."""
    monkeypatch.setattr(module, "chunk_rows", lambda *_: 2)
    x = torch.ones(1200, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    ops.linear_cross_entropy(x, weight, torch.zeros(1200).long()).backward()
    assert weight.grad.tolist() == [[-600], [600]]


@pytest.mark.native
def test_sums_in_two_halves_are_sums_in_fp32():
    high, low = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000, dtype=torch.int16)
    parts = [randn(1000, dtype=torch.bfloat16, seed=i) * 10.0**-i for i in range(5)]
    high.copy_(parts[0])
    want = parts[0].float()
    for i, part in enumerate(parts[1:], 1):
        native.accumulate(high, low, part, i > 1, i == 4)
        want += part
        if i < 4:
            bits = (high.view(torch.int16).int() << 16) | (low.int() & 0xFFFF)
            assert bits.view(torch.float32).equal(want)
    assert high.equal(want.bfloat16())


class LiveBytes(TorchDispatchMode):
    """The most bytes at a time of tensors that were made under it."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if hasattr(x, "storage")}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {k: v for k, v in self.live.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_never_exist_as_a_whole(dtype, monkeypatch):
    """What is made beside the results is a chunk of logits, and a block of the weight's gradient or
    in 16-bit what that takes to be summed in fp32."""
    rows, width, classes, block = 1024, 16, 6001, 512
    x, weight, _, targets = inputs(rows, width, classes, dtype, ignored=False)
    monkeypatch.setattr(module, "_cache_bytes", lambda: 128 * classes * x.element_size())
    monkeypatch.setattr(module, "_WGRAD_BLOCK", block)
    size = chunk_rows(rows, classes * x.element_size())
    assert size == 128
    criterion = (-100, 0.9, 0.1 / classes, 0.0)
    with LiveBytes() as ours:
        outputs = module._run(
            *(x, weight, None, targets, *criterion),
            drows=torch.ones(rows),
            needs=[True, True, False],
        )
    made = sum(t.nbytes for t in outputs)
    is_split = dtype == torch.bfloat16 and native.takes(x)
    sums = {True: 2, False: 0 if dtype == torch.float32 else 4}[is_split] * weight.numel()
    beside = block * width * 4 + size * width * 8 + rows * 32
    if not native.takes(x):  # plain PyTorch makes softmax and gradient of a chunk step by step
        beside += 2 * size * classes * 4
    assert ours.peak <= made + size * classes * x.element_size() + sums + beside
    assert ours.peak <= made + size * classes * 4 + beside
    with LiveBytes() as plain, torch.enable_grad():
        leaves = [t.requires_grad_() for t in (x, weight)]
        torch.autograd.grad(F.cross_entropy(F.linear(*leaves), targets), leaves)
    assert plain.peak - made > 4 * (ours.peak - made)


def test_chunks_fit_the_cache_and_are_of_one_size(monkeypatch):
    monkeypatch.setattr(module, "_cache_bytes", lambda: 32 << 20)
    assert chunk_rows(2048, 30522 * 2) == 512
    assert chunk_rows(2048, 30522 * 4) == 256
    assert chunk_rows(1024, 50257 * 2) == 256  # four of 256 rather than three of 333 and a rest
    assert chunk_rows(10, 30522 * 2) == 32
    assert chunk_rows(0, 30522 * 2) == 0
    assert chunk_rows(4096, 1 << 20) == 128  # fewer would be slower than what leaves the cache
    monkeypatch.setattr(module, "_cache_bytes", lambda: 256 << 20)
    assert chunk_rows(2048, 30522 * 2) == 512  # what malloc does not keep is not used again
    for rows in range(1, 3000, 7):
        size = chunk_rows(rows, 30522 * 2)
        assert size <= 549
        assert size * (-(-rows // size) - 1) < rows


def test_the_cache_is_that_of_the_system(tmp_path, monkeypatch):
    for i, text in enumerate(("48K\n", "1024K\n", "32768K\n")):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(text)
    monkeypatch.setattr(module, "_CACHE_FOLDER", tmp_path)
    assert module._cache_bytes.__wrapped__() == 32 << 20
    monkeypatch.setattr(module, "_CACHE_FOLDER", tmp_path / "absent")
    assert module._cache_bytes.__wrapped__() == module._CACHE_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_the_gradients_or_the_inputs(dtype):
    x, weight, bias, targets = inputs(20, 30, 50, dtype)
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    for reduction in ("sum", "mean"):
        form = of_tensors(ops.linear_cross_entropy, targets, reduction=reduction)
        assert saved_bytes(form, x, weight, bias) == x.nbytes + weight.nbytes + bias.nbytes
        assert saved_bytes(form, x, weight.detach(), None) == x.nbytes + weight.nbytes
        weight.requires_grad_(False)
        assert saved_bytes(form, x, weight, None) == x.nbytes
        weight.requires_grad_()
    form = of_tensors(ops.linear_cross_entropy, targets, reduction="none")
    assert saved_bytes(form, x, weight, bias) == x.nbytes + targets.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_graph_that_is_kept_gives_its_gradients_again(reduction, dtype):
    *tensors, targets = inputs(20, 30, 50, dtype)
    leaves = [t.requires_grad_() for t in tensors]
    loss = of_tensors(ops.linear_cross_entropy, targets, reduction=reduction)(*leaves).sum()
    first, second = (torch.autograd.grad(4 * loss, leaves, retain_graph=True) for _ in range(2))
    last = torch.autograd.grad(loss, leaves)
    for a, b, c in zip(first, second, last, strict=True):
        assert a.equal(b)
        assert a.equal(4 * c)


def test_a_tied_weight_gets_both_gradients():
    weight = randn(50, 30).requires_grad_()
    targets = torch.arange(20)
    ops.linear_cross_entropy(weight[20:40] * 2, weight, targets).backward()
    got, weight.grad = weight.grad, None
    F.cross_entropy(F.linear(weight[20:40] * 2, weight), targets, reduction="sum").backward()
    torch.testing.assert_close(got, weight.grad, rtol=1e-5, atol=1e-5)


@pytest.fixture
def _keep_num_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_small_chunks", "_keep_num_threads")
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_run_gives_the_same_bits(dtype, reduction, monkeypatch):
    # MKL cuts a long sum among its threads on Intel CPUs, as F.linear alone shows; oneDNN does not
    monkeypatch.setattr(linear, "probe", lambda: Probe(True, "chosen by the test"))
    *tensors, targets = inputs(5 * ROWS, 64, 1601, dtype)
    leaves = [t.requires_grad_() for t in tensors]
    runs = []
    for num_threads in (2, 2, 1, 3):
        torch.set_num_threads(num_threads)
        loss, rows = of_tensors(
            partial(ops.linear_cross_entropy, with_rows=True), targets, reduction=reduction
        )(*leaves)
        runs.append([loss, *rows, *torch.autograd.grad(loss.sum(), leaves)])
    for run in runs[1:]:
        assert all(a.equal(b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.usefixtures("_keep_num_threads")
def test_a_sum_over_many_rows_gives_the_same_bits_on_any_number_of_threads():
    x, weight, _, _ = inputs(100_000, 1, 2)
    totals = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        totals.append(ops.linear_cross_entropy(x, weight, torch.zeros(100_000).long()))
    assert totals[0].equal(totals[1])
    assert totals[0].equal(totals[2])
