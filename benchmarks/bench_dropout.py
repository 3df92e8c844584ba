"""Dropout forward + backward, and the cost of a decision.  python -m benchmarks.bench_dropout"""

from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.harness import Report, compiled, device_from_arguments, time_steps
from taut.ops import Dropout, dropout
from taut.ops.dropout import dropout_reference
from taut.testing import assert_accurate, saved_bytes

SHAPES = {"cpu": [(2048, 768), (4096, 3072)], "cuda": [(32768, 1024)]}  # (T, D)


def decisions(report: Report) -> None:
    """Nanoseconds a decision on one core, in cache: its cost inside another pass."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.ones(1, 8192)
    step = partial(dropout, x, Dropout(0.1, seed=1))
    call = partial(dropout, x[:, :1].contiguous(), Dropout(0.1, seed=1))  # all but the decisions
    with torch.inference_mode():
        times = time_steps({"taut": step, "call": call}, rounds=100)
    ns = (min(times["taut"]) - min(times["call"])) / x.numel() * 1e9
    report.note("generator, one core", ns_per_decision=round(ns, 4), target=0.35, met=ns <= 0.35)
    torch.set_num_threads(threads)


def main(device: str) -> None:
    report = Report("dropout", device)
    if device == "cpu":
        decisions(report)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES[device]:
            x, dy = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
            where = Dropout(0.1, seed=1)
            assert_accurate(
                partial(dropout, dropout=where), partial(dropout_reference, dropout=where), (x,), dy
            )
            x.requires_grad_()

            def step(f, x=x, dy=dy):
                return torch.autograd.grad(f(x), x, dy)

            eager = partial(F.dropout, p=0.1)
            variants = {
                "eager": eager,
                "compiled": compiled(eager),
                "taut": partial(dropout, dropout=where),
            }
            report.compare(
                f"dropout {shape} {dtype}",
                {name: partial(step, f) for name, f in variants.items()},
                bytes_moved=4 * dy.nbytes,
                saved={name: saved_bytes(f, x) for name, f in variants.items()},
                targets={"eager": 1.0, "compiled": 1.0},
            )
    report.write()


if __name__ == "__main__":
    main(device_from_arguments(__doc__))
