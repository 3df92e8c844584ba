"""mlp forward + backward at BERT-base width.  python -m benchmarks.bench_mlp [--device cuda]"""

from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.harness import Report, compiled, device_from_arguments
from taut.ops import Dropout, mlp
from taut.ops.linear import dgrad, forward, wgrad
from taut.ops.mlp import mlp_reference
from taut.testing import assert_accurate, saved_bytes

WIDTH, HIDDEN = 768, 3072
ROWS = {"cpu": 2048, "cuda": 16384}
P = 0.1


def plain(x, w1, b1, w2, b2):
    return F.linear(F.dropout(F.gelu(F.linear(x, w1, b1)), P), w2, b2)


def taut(x, w1, b1, w2, b2):
    return mlp(x, w1, b1, w2, b2, dropout=Dropout(P, seed=1))


def main(device: str) -> None:
    report = Report("mlp", device)
    rows = ROWS[device]
    for dtype in (torch.bfloat16, torch.float32):
        draw = partial(torch.randn, dtype=dtype, device=device)
        x, dy, hidden = draw(rows, WIDTH), draw(rows, WIDTH), draw(rows, HIDDEN)
        w1, b1 = draw(HIDDEN, WIDTH) / WIDTH**0.5, draw(HIDDEN)
        w2, b2 = draw(WIDTH, HIDDEN) / HIDDEN**0.5, draw(WIDTH)
        parameters = [torch.nn.Parameter(t) for t in (w1, b1, w2, b2)]
        where = Dropout(P, seed=1)
        assert_accurate(
            partial(mlp, dropout=where),
            partial(mlp_reference, dropout=where),
            (x[:64], *parameters),
            dy[:64],
            factor=5 if dtype == torch.float32 else 2,  # oneDNN's GEMM: see bench_linear.py
        )
        inputs = [x.requires_grad_(), *parameters]

        def step(f, inputs=inputs, dy=dy):
            return torch.autograd.grad(f(*inputs), inputs, dy)

        @torch.no_grad()
        def gemms(x=x, w1=w1, b1=b1, w2=w2, b2=b2, dy=dy, hidden=hidden):
            forward(x, w1, b1), forward(hidden, w2, b2)
            dgrad(dy, w2), wgrad(dy, hidden), dgrad(hidden, w1), wgrad(hidden, x)

        variants = {"eager": plain, "compiled": compiled(plain), "taut": taut}
        report.compare(
            f"mlp {rows} x {WIDTH} -> {HIDDEN} -> {WIDTH} {dtype} p={P}",
            {**{name: partial(step, f) for name, f in variants.items()}, "gemms alone": gemms},
            flops=12 * rows * WIDTH * HIDDEN,
            saved={name: saved_bytes(f, *inputs) for name, f in variants.items()},
            targets={"compiled": 1.3, "gemms alone": 0.85} if device == "cpu" else None,
            rounds=6,
        )
    report.write()


if __name__ == "__main__":
    main(device_from_arguments(__doc__))
