"""The drop-in layers: torch.nn's in everything but what they keep for the backward pass."""

import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import taut
from taut.testing import assert_accurate, saved_bytes

LAYERS = {
    "LayerNorm": ((24,), {}),
    "LayerNorm of an int": (24, {}),
    "LayerNorm of two dimensions": ((5, 24), {"eps": 1e-3}),
    "LayerNorm without bias": (24, {"bias": False}),
    "LayerNorm without parameters": ((5, 24), {"elementwise_affine": False}),
    "RMSNorm": (24, {}),
    "RMSNorm with eps": ((24,), {"eps": 1e-2}),
    "RMSNorm of two dimensions": ((5, 24), {}),
    "RMSNorm without parameters": (24, {"elementwise_affine": False}),
    "GELU": ("none", {}),
    "GELU of tanh": ("tanh", {}),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_layer = pytest.mark.parametrize("name", LAYERS)


def make_pair(name, **kwargs):
    """torch's layer and ours, with parameters that are neither 0 nor 1, and alike."""
    argument, options = LAYERS[name]
    options = options | (kwargs if "Norm" in name else {})
    pair = [getattr(package, name.split()[0])(argument, **options) for package in (nn, taut.nn)]
    with torch.no_grad():
        for parameter in pair[0].parameters():
            parameter.normal_()
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


def as_function(layer):
    """The layer as a function of its input and its parameters."""
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, given, (x,))

    return run


@every_layer
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_are_those_of_torch(name, dtype):
    theirs, ours = make_pair(name, dtype=dtype)
    x = 2 * torch.randn(3, 4, 5, 24)
    x = torch.where((x + 0.75).abs() < 0.5, x + 1.5, x).to(dtype)  # away from GELU's minimum
    for rows in (x, x[0, 0]):
        inputs = (rows, *theirs.parameters())
        assert_accurate(as_function(ours), as_function(theirs), inputs)


@every_layer
def test_state_dicts_are_interchangeable(name):
    argument, options = LAYERS[name]
    theirs, ours = make_pair(name)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    fresh = type(theirs)(argument, **options)
    fresh.load_state_dict(ours.state_dict())
    for parameter, want in zip(fresh.parameters(), theirs.parameters(), strict=True):
        assert parameter.equal(want)


@pytest.mark.parametrize("layer", ["LayerNorm", "RMSNorm"])
def test_constructors_take_device_and_dtype(layer):
    layer = getattr(taut.nn, layer)(8, dtype=torch.bfloat16, device="meta")
    assert [(p.dtype, p.is_meta) for p in layer.parameters()] == [
        (torch.bfloat16, True) for _ in layer.parameters()
    ]
    assert layer(torch.zeros(2, 8, dtype=torch.bfloat16, device="meta")).shape == (2, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "LayerNorm of two dimensions"])
def test_fp32_parameters_meet_16_bit_inputs(name, dtype):
    """As under autocast, where the norms of a model stay in fp32."""
    theirs, ours = make_pair(name)
    x = torch.randn(4, 5, 24).to(dtype)
    y = ours(x)
    assert y.dtype == dtype
    want = theirs.double()(x.double())
    assert (y - want).abs().max() <= torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_without_eps_takes_that_of_torch(dtype):
    """In rows as small as these eps is what decides."""
    x = (1e-4 * torch.randn(8, 24)).to(dtype)
    theirs, ours = nn.RMSNorm(24, dtype=dtype), taut.nn.RMSNorm(24, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x))
    assert 0.05 < ours(x).abs().max() < 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_less_is_kept_than_by_torch(dtype):
    x = torch.randn(40, 24).to(dtype)
    theirs, ours = make_pair("LayerNorm", dtype=dtype)
    assert saved_bytes(ours, x) == x.nbytes + 4 * 40
    assert saved_bytes(ours, x) <= saved_bytes(theirs, x)
    linear = nn.Linear(24, 3, dtype=dtype)
    # torch keeps the input and the output of GELU, we the output, which the linear keeps anyway
    assert saved_bytes(nn.Sequential(nn.GELU(), linear), x) == 2 * x.nbytes
    assert saved_bytes(nn.Sequential(taut.nn.GELU(), linear), x) == x.nbytes + x.numel() // 8
    assert saved_bytes(nn.Dropout(0.1), x) >= x.numel()
    assert saved_bytes(taut.nn.Dropout(0.1), x) == 0


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 0, 3), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_dropout_takes_any_shape_in_either_mode(shape, p):
    layer = taut.nn.Dropout(p)
    x = torch.rand(shape) + 1
    x.requires_grad_()
    y = layer(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.sum().backward()
    torch.testing.assert_close(x.grad * x, y)  # dx is the mask times its scale
    assert y.unique().numel() <= x.numel()
    assert layer.eval()(x) is x
    assert nn.Dropout(p).eval()(x) is x


def test_dropout_of_everything_gives_zeros():
    x = torch.tensor([1.0, math.inf, math.nan], requires_grad=True)
    y = taut.nn.Dropout(1.0)(x)
    y.sum().backward()
    assert y.tolist() == [0, 0, 0]
    assert x.grad.tolist() == [0, 0, 0]


def test_dropout_drops_its_share_and_scales_the_rest():
    y = taut.nn.Dropout(0.25)(torch.ones(200, 300))
    assert abs((y == 0).double().mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 60000)
    torch.testing.assert_close(y[y != 0], torch.tensor(4 / 3).expand((y != 0).sum()))


def test_dropout_follows_the_seed_of_torch():
    layer, x = taut.nn.Dropout(0.5), torch.ones(20, 30)
    torch.manual_seed(5)
    first = layer(x), layer(x)
    torch.manual_seed(5)
    again = layer(x), layer(x)
    assert not first[0].equal(first[1])
    assert first[0].equal(again[0])
    assert first[1].equal(again[1])
    torch.manual_seed(6)
    assert not layer(x).equal(first[0])


def test_dropout_without_effect_draws_nothing():
    torch.manual_seed(5)
    want = torch.rand(())
    torch.manual_seed(5)
    x = torch.ones(3)
    for layer in (taut.nn.Dropout(0.5).eval(), taut.nn.Dropout(0.0), taut.nn.Dropout(1.0)):
        layer(x)
    assert torch.rand(()).equal(want)


def test_dropout_is_the_same_when_a_checkpoint_runs_it_again():
    layer, x = taut.nn.Dropout(0.5), torch.ones(20, 30, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: layer(x) * x, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad.equal(2 * y)


def make_block():
    return nn.Sequential(
        taut.nn.LayerNorm(8),
        nn.Linear(8, 16),
        taut.nn.GELU(),
        taut.nn.Dropout(0.5),
        nn.Linear(16, 8),
        taut.nn.RMSNorm(8),
    )


def test_eval_is_deterministic():
    block, x = make_block(), torch.randn(4, 8)
    assert not block(x).equal(block(x))
    block.eval()
    assert block(x).equal(block(x))


@pytest.fixture
def _forget_compiled_code():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Dynamo silences this warning of its own in a way that does not reach warnings made errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("_forget_compiled_code")
def test_layers_compile_with_one_graph_break_for_the_seed():
    block, x = make_block(), torch.randn(4, 8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter)
    num_graphs = []
    for seed in range(5):
        torch.manual_seed(seed)
        got = compiled(x)
        grads = torch.autograd.grad(got.square().sum(), list(block.parameters()))
        torch.manual_seed(seed)
        want = block(x)
        assert got.equal(want)
        wanted_grads = torch.autograd.grad(want.square().sum(), list(block.parameters()))
        assert all(a.equal(b) for a, b in zip(grads, wanted_grads, strict=True))
        num_graphs.append(counter.frame_count)
    assert num_graphs[-1] == num_graphs[2]  # a new seed compiles nothing new


@pytest.mark.usefixtures("_forget_compiled_code")
def test_layers_compile_whole_without_dropout():
    block, x = make_block().eval(), torch.randn(4, 8)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert compiled(x).equal(block(x))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: taut.nn.Dropout(0.1, inplace=True), "Dropout: inplace=True is not supported"),
        (lambda: taut.nn.Dropout(1.1), "dropout probability has to be between 0 and 1"),
        (lambda: taut.nn.GELU("erf"), "GELU: approximate must be 'none' or 'tanh'; got 'erf'"),
        (
            lambda: taut.nn.LayerNorm((5, 24))(torch.ones(2, 24)),
            r"LayerNorm: the last dimensions of its input must be \(5, 24\); got \(2, 24\)",
        ),
        (
            lambda: taut.nn.RMSNorm(8, elementwise_affine=False)(torch.ones(2, 24)),
            r"RMSNorm: the last dimensions of its input must be \(8,\); got \(2, 24\)",
        ),
        (lambda: taut.nn.LayerNorm((2, 3))(torch.ones(3)), r"must be \(2, 3\); got \(3,\)"),
        (lambda: taut.nn.GELU()(torch.ones(2).long()), "gelu: x must be a dense"),
    ],
)
def test_what_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
