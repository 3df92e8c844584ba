"""Accuracy against float64, bytes kept for backward, gloo ranks: for the tests and benchmarks."""

import gc
import math
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, multiprocessing

Form = Callable[..., Any]


def assert_accurate(
    fn: Form,
    reference: Form,
    inputs: Sequence[Any],
    dy: Tensor | Sequence[Tensor | None] | None = None,
    factor: float = 2,
    **kwargs: Any,
) -> None:
    """Hold fn to the accuracy of plain PyTorch, for each output and each gradient of an input.

    The truth is the reference in float64. The largest error of fn may be `factor` times that of
    the reference in the dtypes of the inputs, plus one ulp of the largest number of the truth.
    dy: the gradient of the output, for several outputs one each (None: that output has none);
    without it a fixed random one. Strides of inputs and dy are kept, kwargs go to both as they are.
    """
    wide_inputs = [x.double() if _is_floating(x) else x for x in inputs]
    ours, plain, wide = (
        _forward(form, x, kwargs)
        for form, x in ((fn, inputs), (reference, inputs), (reference, wide_inputs))
    )
    dys = _upstream(dy, plain.outputs)
    wide_dys = [g if g is None else g.double() for g in dys]
    _same_names(ours.outputs, plain.outputs)
    for name, y in plain.outputs.items():
        _compare(name, ours.outputs[name], y, wide.outputs[name], factor)
    got, want, truth = _gradients(ours, dys), _gradients(plain, dys), _gradients(wide, wide_dys)
    _same_names(got, want)
    for name, dx in want.items():
        _compare(name, got[name], dx, truth[name], factor)


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _copy(x: Tensor) -> Tensor:
    """A copy with the strides of x, expanded dimensions included."""
    if x.numel() == 0:
        return x.detach().clone()
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    flat = x.detach().as_strided((extent,), (1,)).clone()
    return flat.as_strided(x.shape, x.stride())


class _Run(NamedTuple):
    leaves: dict[str, Tensor]  # the floating inputs
    outputs: dict[str, Tensor]


def _forward(form: Form, inputs: Sequence[Any], kwargs: dict[str, Any]) -> _Run:
    fresh = [_copy(x).requires_grad_() if _is_floating(x) else x for x in inputs]
    outputs = form(*fresh, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return _Run(
        {f"gradient of input {i}": x for i, x in enumerate(fresh) if _is_floating(x)},
        {f"output {i}": y for i, y in enumerate(outputs)},
    )


def _upstream(
    dy: Tensor | Sequence[Tensor | None] | None, outputs: dict[str, Tensor]
) -> list[Tensor | None]:
    if dy is None:
        gen = torch.Generator().manual_seed(0)
        return [torch.randn(y.shape, generator=gen).to(y) for y in outputs.values()]
    dys: list[Tensor | None] = [dy] if isinstance(dy, Tensor) else list(dy)
    if len(dys) != len(outputs):
        raise AssertionError(f"{len(outputs)} outputs but {len(dys)} gradients of them")
    return dys


def _gradients(run: _Run, dys: list[Tensor | None]) -> dict[str, Tensor]:
    pairs = [
        (y, _copy(dy))
        for y, dy in zip(run.outputs.values(), dys, strict=True)
        if dy is not None and y.requires_grad
    ]
    if not pairs:
        return {}
    ys, given = zip(*pairs, strict=True)
    grads = torch.autograd.grad(ys, list(run.leaves.values()), given, allow_unused=True)
    return {n: g for n, g in zip(run.leaves, grads, strict=True) if g is not None}


def _same_names(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    if got.keys() != want.keys():
        raise AssertionError(
            f"the reference gives {', '.join(want)}; got {', '.join(got) or 'nothing'}"
        )


def _compare(name: str, got: Tensor, want: Tensor, truth: Tensor, factor: float) -> None:
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        raise AssertionError(
            f"{name}: the reference gives {tuple(want.shape)} {want.dtype}; "
            f"got {tuple(got.shape)} {got.dtype}"
        )
    if truth.numel() == 0:
        return
    error, allowed = _error(got, truth), _error(want, truth).max().item()
    ulp = _ulp(truth.nan_to_num(0, 0, 0).abs().max().item(), want.dtype)
    bound = factor * allowed + ulp
    if math.isinf(bound):
        raise AssertionError(f"{name}: the reference itself fails in {want.dtype}: no bound")
    if error.max().item() > bound:
        worst = int(error.argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
        raise AssertionError(
            f"{name}: error {error.max().item():.3g} exceeds {bound:.3g}, which is {factor} x "
            f"{allowed:.3g} (the reference in {want.dtype}) + {ulp:.3g} (one ulp); at {index} got "
            f"{got[index].item():.9g}, truth {truth[index].item():.9g}"
        )


def _error(x: Tensor, truth: Tensor) -> Tensor:
    """|x - truth|; infinite where just one is NaN or infinite, 0 where both are alike."""
    alike = (x == truth) | (x.isnan() & truth.isnan())
    error = (x.double() - truth).abs().nan_to_num(math.inf, math.inf)
    return torch.where(alike, 0.0, error)


def _ulp(value: float, dtype: torch.dtype) -> float:
    """The distance from value to the next number of this dtype."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(value, info.smallest_normal)))


class _Packed:
    """A tensor in the hands of the graph."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Saved(NamedTuple):
    """A tensor kept for the backward pass."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int  # of the storage that it keeps alive


def saved_tensors(fn: Form, *args: Any, **kwargs: Any) -> list[Saved]:
    """What fn keeps for backward, in order; each storage once, nn.Parameters not at all.

    Floating tensors among args are made to want a gradient; kwargs go in as they are.
    """
    packed: list[weakref.ref[_Packed]] = []

    def pack(x: Tensor) -> _Packed:
        held = _Packed(x.detach())  # the graph owns it: what dies before fn returns is not kept
        packed.append(weakref.ref(held))
        return held

    inputs = [
        x.detach().requires_grad_()
        if _is_floating(x) and not isinstance(x, torch.nn.Parameter)
        else x
        for x in args
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.x):
        outputs = fn(*inputs, **kwargs)
    # a view made inside a compiled graph does not name its base, so parameters go by their storage
    seen = {
        x.untyped_storage().data_ptr()
        for x in gc.get_objects()
        if issubclass(type(x), torch.nn.Parameter)
    }
    saved = []
    for held in (ref() for ref in packed):
        if held is not None and (storage := held.x.untyped_storage()).data_ptr() not in seen:
            seen.add(storage.data_ptr())
            saved.append(Saved(tuple(held.x.shape), held.x.dtype, storage.nbytes()))
    del outputs  # it kept the graph alive until here
    return saved


def saved_bytes(fn: Form, *args: Any, **kwargs: Any) -> int:
    """Bytes that fn keeps for backward, counted as saved_tensors lists them."""
    return sum(x.num_bytes for x in saved_tensors(fn, *args, **kwargs))


def run_distributed(
    check: Callable[..., None], world_size: int, *args: Any, timeout_s: float = 120
) -> None:
    """Run check(rank, world_size, *args) on gloo ranks, one process with one thread each.

    check is a function of a module. If a rank raises, dies or hangs, the others are ended and its
    traceback is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = multiprocessing.start_processes(
            _run_rank,
            (check, world_size, f"file://{folder}/store", timeout_s, args),
            nprocs=world_size,
            join=False,
            start_method="spawn",
        )
        deadline = time.monotonic() + timeout_s
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    late = [i for i, x in enumerate(ranks.processes) if x.is_alive()]
                    raise TimeoutError(f"ranks {late} did not finish within {timeout_s} s")
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()


def _run_rank(
    rank: int, check: Form, world_size: int, store: str, timeout_s: float, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", store, timedelta(seconds=timeout_s), world_size=world_size, rank=rank
    )
    check(rank, world_size, *args)
    distributed.destroy_process_group()
