"""linear_cross_entropy forward + backward.

python -m benchmarks.bench_linear_cross_entropy [--device cuda]
"""

import ctypes
import gc
import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.harness import Report, _call_seconds, compiled, device_from_arguments
from taut.ops import linear_cross_entropy
from taut.ops.linear import forward, wgrad
from taut.ops.linear_cross_entropy import (
    _WGRAD_BLOCK,
    _dgrad,
    chunk_rows,
    linear_cross_entropy_reference,
)
from taut.testing import assert_accurate, saved_bytes

WIDTH = 768
SHAPES = {  # (T, V): BERT's and GPT-2's vocabulary
    "cpu": [(2048, 30522), (1024, 50257)],
    "cuda": [(16384, 30522), (8192, 50257), (8192, 50304)],
}
TARGETS = {torch.float32: 1.1, torch.bfloat16: 1.3}
SMOOTHING = 0.1


def plain(targets, x, weight):
    return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")


def chunked(targets, x, weight):
    """PyTorch's own, by its own choice of chunks."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight, targets, reduction="sum", options=options)


def taut(targets, x, weight, **options):
    return linear_cross_entropy(x, weight, targets, **options)


FORMS = {"eager": plain, "compiled": plain, "chunked": chunked, "taut": taut}


@torch.no_grad()
def gemms(x, weight):
    """The three GEMMs of each chunk, in the pieces in which the op has them made."""
    rows, classes = x.shape[0], weight.shape[0]
    size = chunk_rows(rows, classes * x.element_size(), x.is_cuda)
    block = classes if x.is_cuda else _WGRAD_BLOCK
    for first in range(0, rows, size):
        xs = x[first : first + size]
        z = forward(xs, weight, None)
        _dgrad(z, weight)
        for column in range(0, classes, block):
            wgrad(z[:, column : column + block], xs)
        del z


def draw(rows, classes, dtype, device):
    gen = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, WIDTH, dtype=dtype, device=device, generator=gen)
    weight = torch.randn(classes, WIDTH, dtype=dtype, device=device, generator=gen) / WIDTH**0.5
    targets = torch.randint(classes, (rows,), device=device, generator=gen)
    return x.requires_grad_(), weight.requires_grad_(), targets


def status_bytes(key):
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def peak_bytes(name, rows, classes, dtype, device):
    """What a step takes at its peak beside its inputs and the gradients that it returns."""
    x, weight, targets = draw(rows, classes, dtype, device)
    form = partial(FORMS[name], targets)
    form = compiled(form) if name == "compiled" else form

    def step():
        return torch.autograd.grad(form(x, weight), (x, weight))

    step()  # what is made once, such as code
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = step()
        peak = torch.cuda.max_memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        before = status_bytes("VmRSS")
        grads = step()
        peak = status_bytes("VmHWM")
    return peak - before - sum(g.nbytes for g in grads)


def peak_elsewhere(*arguments):
    """In a process of its own, whose memory nobody has used yet."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(peak_bytes, *arguments).result()


def main(device: str) -> None:
    report = Report("linear_cross_entropy", device)
    for rows, classes in SHAPES[device]:
        for dtype in (torch.bfloat16, torch.float32):
            measure(report, rows, classes, dtype, device)
    report.write()


def measure(report: Report, rows: int, classes: int, dtype: torch.dtype, device: str) -> None:
    case = f"linear_cross_entropy ({rows}, {WIDTH}) x {classes} {dtype}"
    x, weight, targets = draw(rows, classes, dtype, device)

    def per_row(form, x, weight):
        return form(x, weight, targets[:64], reduction="none")

    assert_accurate(  # never time a wrong kernel
        partial(per_row, linear_cross_entropy),
        partial(per_row, linear_cross_entropy_reference),
        (x[:64].detach(), weight.detach()),
        # oneDNN sums K products in one chain, MKL in up to 16: sqrt(16) times the rounding
        factor=5 if dtype == torch.float32 else 2,
    )

    def step(form):
        return torch.autograd.grad(form(x, weight), (x, weight))

    variants = {name: partial(form, targets) for name, form in FORMS.items()}
    variants["compiled"] = compiled(variants["compiled"])
    chunks = variants.pop("chunked")
    steps = {name: partial(step, form) for name, form in variants.items()}
    smoothed = partial(taut, targets, label_smoothing=SMOOTHING)
    steps |= {"taut, smoothed": partial(step, smoothed), "gemms alone": partial(gemms, x, weight)}
    target = TARGETS[dtype]
    best = report.compare(
        case,
        steps,
        flops=6 * rows * classes * WIDTH,
        saved={name: saved_bytes(form, x, weight) for name, form in variants.items()},
        targets={"eager": target, "compiled": target},
        rounds=3,
    )
    ratio = best["taut, smoothed"] / best["taut"]
    report.note(f"{case}: label smoothing", times_as_long=round(ratio, 3), met=ratio <= 1.02)
    names = [*variants]
    if hasattr(F, "linear_cross_entropy"):
        # so slow on a CPU that it is not given turns
        times = [_call_seconds(partial(step, chunks), device) for _ in range(2)]
        ratio = min(times) / best["taut"]
        report.note(
            f"{case}: PyTorch's own chunks",
            min_ms=round(min(times) * 1e3, 4),
            times_as_long_as_taut=round(ratio, 3),
            target=target,
            met=ratio >= target,
        )
        names.append("chunked")
    peaks = {name: peak_elsewhere(name, rows, classes, dtype, device) for name in names}
    fastest = min(("eager", "compiled"), key=best.__getitem__)
    report.note(
        f"{case}: bytes at the peak beside inputs and gradients",
        **peaks,
        of_the_fastest_peer=round(peaks["taut"] / peaks[fastest], 3),
        met=peaks["taut"] <= peaks[fastest] / 2,
    )


if __name__ == "__main__":
    main(device_from_arguments(__doc__))
