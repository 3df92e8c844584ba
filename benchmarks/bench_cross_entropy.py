"""cross_entropy of given logits, forward + backward.

python -m benchmarks.bench_cross_entropy [--device cuda]
"""

from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.harness import Report, compiled, device_from_arguments
from taut.ops import cross_entropy
from taut.ops.cross_entropy import cross_entropy_reference
from taut.testing import assert_accurate, saved_bytes

SHAPES = {  # (T, V): past the last-level cache
    "cpu": [(2048, 30522), (1024, 50257)],
    "cuda": [(16384, 30522), (8192, 50257), (8192, 50304)],
}


def plain(targets, logits):
    return F.cross_entropy(logits, targets, reduction="sum")


def main(device: str) -> None:
    report = Report("cross_entropy", device)
    for dtype in (torch.float32, torch.bfloat16):
        for rows, classes in SHAPES[device]:
            gen = torch.Generator(device).manual_seed(0)
            logits = torch.randn(rows, classes, dtype=dtype, device=device, generator=gen)
            targets = torch.randint(classes, (rows,), device=device, generator=gen)
            options = {"targets": targets[:64], "reduction": "none"}
            assert_accurate(  # never time a wrong kernel
                partial(cross_entropy, **options),
                partial(cross_entropy_reference, **options),
                (logits[:64],),
            )
            logits.requires_grad_()
            variants = {
                "eager": partial(plain, targets),
                "compiled": compiled(partial(plain, targets)),
                "taut": partial(cross_entropy, targets=targets),
                "taut, in place": partial(cross_entropy, targets=targets, in_place=True),
            }

            def step(form, logits=logits):
                return torch.autograd.grad(form(logits), logits)

            report.compare(
                f"cross_entropy ({rows}, {classes}) {dtype}",
                {name: partial(step, form) for name, form in variants.items()},
                # forward reads the logits, backward reads and writes them
                bytes_moved=3 * logits.nbytes,
                saved={name: saved_bytes(form, logits) for name, form in variants.items()},
                rounds=5,
            )
    report.write()


if __name__ == "__main__":
    main(device_from_arguments(__doc__))
