"""GELU from its output, forward + backward.  python -m benchmarks.bench_gelu [--device cuda]

Lands for memory: it keeps a bit an element and the output, which the next linear keeps anyway.
"""

from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.harness import Report, compiled, device_from_arguments
from taut.ops import gelu
from taut.testing import saved_bytes

SHAPES = {"cpu": [(2048, 3072), (4096, 4096)], "cuda": [(16384, 3072)]}  # (T, F)


def main(device: str) -> None:
    report = Report("gelu", device)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES[device]:
            weight = torch.nn.Parameter(torch.randn(8, shape[1], dtype=dtype, device=device))
            x, dy = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
            x.requires_grad_()

            def step(f, x=x, dy=dy):
                return torch.autograd.grad(f(x), x, dy)

            variants = {"eager": F.gelu, "compiled": compiled(F.gelu), "taut": gelu}
            report.compare(
                f"gelu {shape} {dtype}",
                {name: partial(step, f) for name, f in variants.items()},
                bytes_moved=5 * dy.nbytes + dy.numel() // 4,
                # with the next linear, which keeps the output of the activation
                saved={
                    name: saved_bytes(lambda x, f=f, w=weight: F.linear(f(x), w), x)
                    for name, f in variants.items()
                },
            )
    report.write()


if __name__ == "__main__":
    main(device_from_arguments(__doc__))
