"""What holds for every op of the catalogue. What holds for one op alone is in its own file."""

import itertools
import sys
from functools import partial

import pytest
import torch
from torch import Generator, Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from taut import ops
from taut.ops.linear import Probe
from taut.testing import assert_accurate
from tests.ops.catalogue import CASES, CASES_BY_NAME, FURTHER_CALLS
from tests.ops.refusals import REFUSALS

# One number, one row, widths around the vectors of the kernels, odd and 3-D, no rows at all.
SHAPES = [
    (1, 1),
    (6,),
    (3, 1),
    (3, 5, 7),
    (4, 63),
    (5, 64),
    (4, 65),
    (3, 255),
    (2, 300),
    (2, 1025),
    (0, 8),
    (2, 0, 5),
]
# More elements than PyTorch gives to one thread, and no odd end in the share of any thread: there
# PyTorch's own exp and tanh round in another way.
LARGE = (64, 520)
HALVES = [torch.bfloat16, torch.float16]

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def _gemm_of_the_case(request, monkeypatch):
    """The GEMM that the case names, not the one that is faster on this machine today."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    chosen = Probe("case" in params and params["case"].is_onednn, "chosen by the test")
    monkeypatch.setattr(sys.modules["taut.ops.linear"], "probe", lambda: chosen)


def as_tuple(y):
    return y if isinstance(y, tuple) else (y,)


def given(inputs):
    return [x for x in inputs if x is not None]


def wanting_gradients(inputs):
    return [x if x is None else x.detach().requires_grad_() for x in inputs]


def results(fn, inputs, kwargs, dy=None):
    """Everything that comes out of fn: outputs, and the gradient of each input that wants one."""
    outputs = as_tuple(fn(*inputs, **kwargs))
    gen = Generator().manual_seed(2)
    dy = dy or [torch.randn(y.shape, generator=gen).to(y) for y in outputs]
    wanted = [x for x in given(inputs) if x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, wanted, dy)]


def assert_same_bits(got, want):
    torch.testing.assert_close(list(got), list(want), rtol=0, atol=0, equal_nan=True)


def draw_by_draw(fn):
    """fn on each of many draws of its inputs: the largest of three errors bounds nothing."""

    def run(*stacks, **kwargs):
        draws = zip(*(itertools.repeat(None) if x is None else x for x in stacks), strict=False)
        outputs = [as_tuple(fn(*inputs, **kwargs)) for inputs in draws]
        return tuple(torch.stack(ys) for ys in zip(*outputs, strict=True))

    return run


@pytest.mark.parametrize(
    ("case", "shape", "dtype"),
    [
        (case, shape, dtype)
        for case in CASES
        for shape in SHAPES
        for dtype in (torch.float32, *HALVES)
        if shape[-1] >= case.least_width
    ],
    ids=str,
)
def test_is_as_accurate_as_pytorch(case, shape, dtype):
    check_accuracy(case, shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 300), (2, 1025), (0, 8)], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if not c.is_onednn], ids=str)
def test_is_as_accurate_as_pytorch_on_a_gpu(case, shape, dtype):
    check_accuracy(case, shape, dtype, "cuda")


def check_accuracy(case, shape, dtype, device):
    gen = Generator().manual_seed(0)
    num_draws = min(1 + 512 // shape[-1], 8)
    draws = [case.make(gen, shape, dtype) for _ in range(num_draws)]
    stacks = [
        None if xs[0] is None else torch.stack(xs).to(device) for xs in zip(*draws, strict=True)
    ]
    fn, reference = draw_by_draw(case.fn), draw_by_draw(case.reference)
    factor = case.factor_32 if dtype == torch.float32 else 2
    assert_accurate(fn, reference, stacks, factor=factor, **case.kwargs(shape, device))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.p], ids=str)
def test_drops_the_same_on_a_gpu(case):
    shape = (5, 200)
    # above zero, so that a zero was dropped; what is hidden stays so
    inputs = [
        x if x is None else torch.where(x.isinf(), x, x.abs() + 1) for x in case.inputs(shape)
    ]
    y, *_ = as_tuple(case.fn(*inputs, **case.kwargs(shape)))
    inputs = [x if x is None else x.cuda() for x in inputs]
    on_gpu, *_ = as_tuple(case.fn(*inputs, **case.kwargs(shape, "cuda")))
    torch.testing.assert_close(on_gpu.cpu(), y, rtol=1e-4, atol=1e-4)


@every_case
def test_takes_float64(case):
    shape = (2, 3, 5)
    inputs, kwargs = case.inputs(shape, torch.float64), case.kwargs(shape)
    got, want = (
        results(form, wanting_gradients(inputs), kwargs) for form in (case.fn, case.reference)
    )
    # no wider type could tell how far plain PyTorch itself is off: 1e-12 is 4500 ulps
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    def fn(*xs):
        return case.fn(*xs, **kwargs)[: case.differentiable]

    torch.autograd.gradcheck(fn, wanting_gradients(inputs), fast_mode=True)


def every_second(x):
    return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def off_by_one(x):
    """Dense, but it begins one element after where its memory begins."""
    return torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape)


def expanded(x):
    """Along the last dimension but one: the rows of a matrix, the heads of an attention."""
    return x.narrow(max(x.dim() - 2, 0), 0, 1).expand(x.shape)


LAYOUTS = [every_second, transposed, off_by_one, expanded]


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_takes_any_memory_layout(case, layout, dtype):
    shape = (4, 3, 70)
    inputs, kwargs = case.inputs(shape, dtype), case.kwargs(shape)
    dy = [layout(torch.randn_like(y)) for y in as_tuple(case.reference(*inputs, **kwargs))]
    laid_out = [x if x is None else layout(x) for x in inputs]
    assert not all(x.is_contiguous() and x.storage_offset() == 0 for x in given(laid_out))
    factor = case.factor_32 if dtype == torch.float32 else 2
    assert_accurate(case.fn, case.reference, laid_out, dy, factor=factor, **kwargs)


@every_case
def test_takes_the_gradient_of_a_sum(case):
    """Its strides are all zero."""
    shape = (4, 70)
    inputs, kwargs = case.inputs(shape), case.kwargs(shape)
    outputs = as_tuple(case.reference(*inputs, **kwargs))
    dy = [y.new_ones(()).expand(y.shape) for y in outputs]
    assert_accurate(case.fn, case.reference, inputs, dy, factor=case.factor_32, **kwargs)


@every_case
def test_gradients_do_not_depend_on_which_are_asked_for(case):
    shape = (3, 5, 7)
    inputs, kwargs = case.inputs(shape), case.kwargs(shape)

    def gradients(chosen):
        leaves = [x if x is None else x.detach().clone() for x in inputs]
        for i in chosen:
            leaves[i].requires_grad_()
        sum(y.square().sum() for y in as_tuple(case.fn(*leaves, **kwargs))).backward()
        return {i: x.grad for i, x in enumerate(leaves) if x is not None and x.grad is not None}

    all_of_them = [i for i, x in enumerate(inputs) if x is not None]
    want = gradients(all_of_them)
    assert list(want) == all_of_them
    for size in range(1, len(all_of_them)):
        for chosen in itertools.combinations(all_of_them, size):
            got = gradients(chosen)
            assert tuple(got) == chosen
            assert_same_bits(got.values(), [want[i] for i in chosen])


@every_case
def test_without_gradients_the_output_is_the_same(case):
    shape = (3, 5, 7)
    inputs, kwargs = case.inputs(shape), case.kwargs(shape)
    want = as_tuple(case.fn(*wanting_gradients(inputs), **kwargs))
    assert all(y.requires_grad for y in want)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            born_inside = [x if x is None else x.clone() for x in inputs]
            for xs in (inputs, wanting_gradients(inputs), born_inside):
                got = as_tuple(case.fn(*xs, **kwargs))
                assert not any(y.requires_grad for y in got)
                assert_same_bits(got, want)


@pytest.fixture
def _keep_num_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@every_case
@pytest.mark.usefixtures("_keep_num_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_run_gives_the_same_bits(case, dtype, monkeypatch):
    # MKL cuts a long sum among its threads on Intel CPUs, as F.linear alone shows; oneDNN does not
    chosen = Probe(True, "chosen by the test")
    monkeypatch.setattr(sys.modules["taut.ops.linear"], "probe", lambda: chosen)
    inputs, kwargs = case.inputs(LARGE, dtype), case.kwargs(LARGE)
    runs = []
    for num_threads in (2, 2, 1):
        torch.set_num_threads(num_threads)
        runs.append(results(case.fn, wanting_gradients(inputs), kwargs))
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


@every_case
def test_leaves_its_inputs_alone(case):
    shape = (3, 5, 7)
    inputs, kwargs = case.inputs(shape), case.kwargs(shape)
    before = [x.clone() for x in given(inputs)]
    outputs = as_tuple(case.fn(*wanting_gradients(inputs), **kwargs))
    dy = [torch.randn_like(y) for y in outputs]
    dy_before = [x.clone() for x in dy]
    results(case.fn, wanting_gradients(inputs), kwargs, dy)
    assert_same_bits(dy, dy_before)
    for y in outputs:  # a view of an input would let the user write into it
        y.detach().fill_(torch.nan)
    assert_same_bits(given(inputs), before)


@every_case
@pytest.mark.parametrize("is_linear", [True, False])
def test_refuses_to_be_differentiated_twice(case, is_linear):
    """A gradient penalty added to a loss. Where the loss is linear in the output, its gradient is a
    constant, and a penalty that counts as another constant would vanish without a word."""
    shape = (3, 5)
    leaves = wanting_gradients(case.inputs(shape))
    outputs = as_tuple(case.fn(*leaves, **case.kwargs(shape)))
    loss = sum((y if is_linear else y.square()).sum() for y in outputs)
    (dx,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        (loss + dx.square().sum()).backward()


class Names(TorchDispatchMode):
    """The names of the ATen ops that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@every_case
def test_outputs_that_nobody_used_cost_no_zeros(case):
    """Autograd makes up gradients for the inner outputs of raw ops unless it is told not to."""
    shape = (3, 5)
    y, *_ = as_tuple(case.fn(*wanting_gradients(case.inputs(shape)), **case.kwargs(shape)))
    with Names() as names:
        y.backward(torch.ones(y.shape))
    assert not [name for name in names.seen if "zero" in name or "full" in name]


@every_case
def test_meta_tensors_give_the_shapes(case):
    shape = (3, 5, 7)
    inputs, kwargs = case.inputs(shape, torch.bfloat16), case.kwargs(shape)
    on_meta = [x if x is None else x.to("meta") for x in inputs]
    dy = [torch.randn_like(y) for y in as_tuple(case.fn(*inputs, **kwargs))]
    want = results(case.fn, wanting_gradients(inputs), kwargs, dy)
    meta_kwargs = case.kwargs(shape, "meta")
    got = results(case.fn, wanting_gradients(on_meta), meta_kwargs, [x.to("meta") for x in dy])
    for a, b in zip(got, want, strict=True):
        assert a.is_meta
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.fixture
def _forget_compiled_code():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_compiles(case, shape, backend):
    inputs, kwargs = case.inputs(shape), case.kwargs(shape)
    compiled = torch.compile(partial(case.fn, **kwargs), fullgraph=True, backend=backend)
    got = results(compiled, wanting_gradients(inputs), {})
    assert_same_bits(got, results(case.fn, wanting_gradients(inputs), kwargs))


@every_case
@pytest.mark.usefixtures("_forget_compiled_code")
def test_compiles_whole(case):
    assert_compiles(case, (3, 5, 7), "aot_eager")


INDUCTOR_CASES = [
    "attention: cross, causal, dropout",
    "cross_entropy: none, smoothed",
    "dropout: on",
    "dropout_add_norm: layer, sum",
    "embedding: norm, dropout",
    "gelu: erf",
    "linear: bias",
    "linear_cross_entropy: none",
    "linear_cross_entropy: sum",
    "mlp: geglu",
    "softmax_attention: dropout",
]


@pytest.mark.usefixtures("_forget_compiled_code")
@pytest.mark.parametrize("case", [CASES_BY_NAME[name] for name in INDUCTOR_CASES], ids=str)
def test_compiles_with_inductor(case):
    assert_compiles(case, (4, 70), "inductor")


@pytest.mark.usefixtures("_forget_compiled_code")
@pytest.mark.parametrize("is_built_inside", [True, False])
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in ("self, dropout", "on", "layer, dropout", "gelu")],
    ids=str,
)
def test_a_new_step_compiles_nothing_new(case, is_built_inside):
    inputs, kwargs = wanting_gradients(case.inputs((4, 6))), case.kwargs((4, 6))

    def dropout_at(step):
        return ops.Dropout(0.3, 2**40 + 1, step)

    def run(dropout):
        dropout = dropout if isinstance(dropout, ops.Dropout) else dropout_at(dropout)
        return case.fn(*inputs, **(kwargs | {"dropout": dropout}))

    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    seen = []
    for step in range(5, 12):
        y = compiled(step if is_built_inside else dropout_at(step))
        assert_same_bits([y], [run(step)])
        seen.append(y)
    assert not any(a.equal(b) for a, b in itertools.pairwise(seen))
    assert counter.frame_count <= 2  # one for the first number, one for every other


@pytest.mark.parametrize("case", [c for c in CASES if c.p], ids=str)
def test_a_dropout_too_small_to_count_drops_nothing(case):
    shape = (3, 5)
    inputs = case.inputs(shape)
    got, want = (
        results(case.fn, wanting_gradients(inputs), case.kwargs(shape) | {"dropout": dropout})
        for dropout in (ops.Dropout(2.0**-26, 0), None)
    )
    assert_same_bits(got, want)


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_refuses(refusal):
    with pytest.raises(ValueError, match=refusal.sentence) as raised:
        refusal.call()
    assert "\n" not in str(raised.value)


def raw_op_names():
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("taut::") for name in names if name.startswith("taut::")}


def record_raw_calls(monkeypatch, run):
    """The raw ops that run() calls, also those called inside of others, with their arguments."""
    calls = []

    def recorder(packet):
        def record(*args):
            copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
            for copy, x in zip(copies, args, strict=True):
                if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
                    copy.requires_grad_()
            calls.append((packet.default, tuple(copies)))
            return packet(*args)

        return record

    with monkeypatch.context() as patch:
        for name in raw_op_names():
            patch.setattr(torch.ops.taut, name, recorder(getattr(torch.ops.taut, name)))
        run()
    return calls


def run_case(case):
    results(case.fn, wanting_gradients(case.inputs((3, 5))), case.kwargs((3, 5)))


RUNS = {str(c): partial(run_case, c) for c in CASES} | {f.__name__: f for f in FURTHER_CALLS}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_raw_ops_are_registered_soundly(run, monkeypatch):
    calls = record_raw_calls(monkeypatch, run)
    assert calls
    for op, args in calls:
        torch.library.opcheck(op, args)


def test_the_catalogue_reaches_every_raw_op(monkeypatch):
    calls = [call for run in RUNS.values() for call in record_raw_calls(monkeypatch, run)]
    assert {op.name() for op, _ in calls} == {f"taut::{name}" for name in raw_op_names()}


def test_the_catalogue_holds_every_public_op():
    public = {name for name in ops.__all__ if not isinstance(getattr(ops, name), type)}
    assert {case.op for case in CASES} == public
    assert {refusal.op for refusal in REFUSALS} >= public
