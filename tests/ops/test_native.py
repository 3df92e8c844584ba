"""The C++ kernels as a library: every build, its threads, and what the binding refuses."""

import subprocess
import sys

import pytest
import torch

from taut.ops import Dropout, library, native
from taut.ops.attention import attention_reference
from taut.ops.embedding import _composite_bwd as embedding_bwd
from taut.ops.embedding import _composite_fwd as embedding_fwd
from taut.ops.mlp import ACTIVATIONS
from taut.ops.mlp import _composite_bwd as activation_bwd
from taut.ops.norm import _composite_bwd as norm_bwd
from taut.ops.norm import _composite_fwd as norm_fwd
from taut.ops.random import keep_mask

# the libraries that this CPU can run; none in an install without a compiler
BUILDS = {
    build: folder
    for folder in library.library_folders()
    for build in library.runnable_builds(folder)
}
KEYED = Dropout(
    0.1,
    5,
    sample_ids=torch.arange(120),
    positions=torch.arange(120),
    key_positions=torch.arange(620) + 3,
    first_head=1,
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def _build(request, monkeypatch):
    loaded = library.load_build(BUILDS[request.param], request.param)
    monkeypatch.setattr(native, "library", loaded)


def every_build(test):
    """Run the test with each library in turn; it is deselected where there is none."""
    test = pytest.mark.parametrize("_build", BUILDS or ["none"], indirect=True)(test)
    return pytest.mark.native(pytest.mark.usefixtures("_build")(test))


def close(got, want, dtype):
    """Within a few ulps of the largest number: every build, against the composite in float64."""
    for a, b in zip(got, want, strict=True):
        ulp = torch.finfo(a.dtype).eps * b.abs().max().clamp_min(1).item() if b.numel() else 0
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=4 * ulp)


@every_build
@pytest.mark.parametrize("p", [2.0**-24, 0.1, 0.5, 0.999])
def test_every_build_draws_the_same_masks(p):
    ids = torch.randint(2**32, (40, 2))
    arguments = (p, 2**40 + 3, 9, 2**31 + 5, ids[:, 0].contiguous(), ids[:, 1].contiguous())
    x = torch.ones(40, 333)
    want = keep_mask(x.shape, x.device, *arguments)
    assert torch.equal(native.dropout(x, arguments) != 0, want)
    assert native.dropout(x, arguments).max() == torch.tensor(1 / (1 - round(p * 2**24) / 2**24))


@every_build
def test_every_build_breaks_ties_as_the_reference_does():
    """Sixteen bits leave one decision in 2^16 open: this p, and enough draws to meet some."""
    arguments = (0.1, 1, 2, 3, None, None)
    shape = (2000, 512)
    low = (0.1 * 2**24 // 256 / 2**16, *arguments[1:])  # the threshold without its low bits
    want = keep_mask(shape, torch.device("cpu"), *arguments)
    assert not torch.equal(want, keep_mask(shape, torch.device("cpu"), *low))
    assert torch.equal(native.dropout(torch.ones(shape), arguments) != 0, want)


@every_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_every_build_attends_the_same(causal, dtype):
    """Twice around the keys that are packed at a time, and odd numbers everywhere."""
    gen = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(120, 4, 21, generator=gen).to(dtype) for _ in range(2))
    k, v = (torch.randn(620, 2, 21, generator=gen).to(dtype) for _ in range(2))
    offsets = [torch.tensor(x).int() for x in ([0, 37, 37, 120], [0, 15, 20, 620])]
    where = (0.1, 5, 0, 0, torch.arange(120), torch.arange(120), torch.arange(620) + 3, 1)
    arguments = (*offsets, causal, 0.2, *where)
    out, lse = native.attention_fwd(q, k, v, *arguments)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want = attention_reference(*leaves, *offsets, causal=causal, scale=0.2, dropout=KEYED)
    close([out], [want], dtype)
    grads = native.attention_bwd(dout, q, k, v, out, lse, *arguments)
    close(grads, torch.autograd.grad(want, leaves, dout.double()), dtype)


@every_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 77, 300])
def test_every_build_computes_the_same(width, dtype):
    gen = torch.Generator().manual_seed(0)
    x, residual, dy, dsum = (torch.randn(9, width, generator=gen).to(dtype) for _ in range(4))
    vectors = [torch.randn(width, generator=gen) for _ in range(3)]
    where = (0.1, 5, 0, 0, None, None)
    for is_rms in (False, True):
        forward = (*vectors, 1e-2, is_rms, True, *where)
        got = native.norm_fwd(x, residual, *forward)
        wide = [t if not isinstance(t, torch.Tensor) else t.double() for t in forward]
        close(got, norm_fwd(x.double(), residual.double(), *wide), dtype)
        _, xhat, rstd, _ = got
        backward = (vectors[1], is_rms, True, True, True, *where)
        wide = [t if not isinstance(t, torch.Tensor) else t.double() for t in backward]
        got = native.norm_bwd(dy, dsum, xhat, rstd, *backward)
        close(got, norm_bwd(dy.double(), dsum.double(), xhat.double(), rstd.double(), *wide), dtype)
    for name, (code, gated) in ACTIVATIONS.items():
        u = torch.randn(9, width * (1 + gated), generator=gen).to(dtype)
        du, a, total = native.activation_bwd(dy, u, code, gated, where)
        want = activation_bwd(dy.double(), u.double(), name, *where)
        close((du, a, total), want, dtype)
        assert torch.equal(a, native.activation_fwd(u, code, gated, where))


@every_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 77, 300])
def test_every_build_embeds_the_same(width, dtype):
    gen = torch.Generator().manual_seed(0)
    dy, *tables = (torch.randn(n, width, generator=gen).to(dtype) for n in (90, 7, 5, 2))
    ids = [torch.randint(len(t), (90,), generator=gen) for t in tables]
    vectors = [torch.randn(width, generator=gen) for _ in range(2)]
    pairs = [t for pair in zip(ids, tables, strict=True) for t in pair]
    wide_pairs = [t.double() if t.is_floating_point() else t for t in pairs]
    where = (0.1, 5, 0, 0, None, None)
    wide_vectors = [t.double() for t in vectors]
    got = native.embedding_fwd(*pairs, *vectors, 3.0, 1e-2, *where)
    close(got, embedding_fwd(*wide_pairs, *wide_vectors, 3.0, 1e-2, *where), dtype)
    _, xhat, rstd = got
    got = native.embedding_bwd(dy, xhat, rstd, vectors[0], True, *where)
    wide = (dy.double(), xhat.double(), rstd.double(), wide_vectors[0])
    close(got, embedding_bwd(*wide, True, *where), dtype)
    dz, total = got[0], torch.ones(7, width)
    native.embedding_wgrad(True, total, dz, ids[0], 2.0, 3)
    want = torch.ones(7, width, dtype=torch.float64)
    want.index_add_(0, ids[0], 2 * dz.double() * (ids[0] != 3)[:, None])
    close([total], [want], dtype)


@every_build
def test_every_build_reads_and_writes_all_halves():
    """Every 16-bit pattern comes back as it was: subnormals, infinities and the largest numbers."""
    for dtype in (torch.bfloat16, torch.float16):
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        x = bits.view(dtype)
        if dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("avx512_bf16", False):
            x = torch.where(x.abs() < torch.finfo(dtype).smallest_normal, 0, x)  # it flushes them
        y = native.dropout(x.view(1, -1), (0.0, 0, 0, 0, None, None)).view(-1)
        assert torch.equal(y.nan_to_num(nan=0.5), x.nan_to_num(nan=0.5))
        assert torch.equal(y.isnan(), x.isnan())


def test_there_is_one_openmp_runtime():
    """In a process of its own: import taut, run a kernel, look at what is mapped."""
    code = (
        "import torch, taut; from taut.ops import library\n"
        "taut.ops.dropout(torch.ones(64, 4096), taut.ops.Dropout(0.5, 0))\n"
        "print(len(library.openmp_runtimes()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.strip() == "1"


@every_build
def test_threads_follow_torch():
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            assert native.library.taut_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


@every_build
def test_the_binding_passes_no_tensor_that_a_kernel_cannot_read():
    none = (0.0, 0, 0, 0, None, None)
    with pytest.raises(AssertionError):
        native.dropout(torch.ones(4, 6)[:, ::2], none)
    with pytest.raises(AssertionError):
        native.dropout(torch.ones(4, 6, device="meta"), none)
    with pytest.raises(AssertionError):
        native.dropout(torch.ones(2, 6), (0.5, 0, 0, 0, torch.zeros(2, dtype=torch.int32), None))
    with pytest.raises(AssertionError):
        native.gelu_bwd(torch.ones(8), torch.ones(8).bfloat16(), torch.zeros(1).byte(), False)


def test_what_runs_is_what_is_installed():
    assert native.takes(torch.ones(1)) is bool(BUILDS)
    assert not native.takes(torch.ones(1, dtype=torch.float64))
    assert (native.build in BUILDS) == bool(BUILDS)
