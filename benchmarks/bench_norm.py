"""dropout_add_norm forward + backward.  python -m benchmarks.bench_norm [--device cuda]"""

from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.harness import Report, compiled, device_from_arguments
from taut.ops import Dropout, dropout_add_norm
from taut.ops.norm import dropout_add_norm_reference
from taut.testing import assert_accurate, saved_bytes

SHAPES = {  # (T, D), BERT-base and BERT-large; in and past the last-level cache
    "cpu": [(2048, 768), (4096, 1024)],
    "cuda": [(4096, 768), (16384, 768), (32768, 1024)],
}

TARGETS = {
    ("cpu", True): {"eager": 8, "compiled": 3, "copy": 0.6},
    ("cpu", False): {"eager": 1.3, "compiled": 1.3},
    ("cuda", True): {"eager": 3, "compiled": 1.15, "copy": 0.8},
    ("cuda", False): {"compiled": 1.0, "copy": 0.8},
}


def plain(p, x, residual, weight, bias, x_bias):
    z = residual + F.dropout(x + x_bias, p)
    return F.layer_norm(z, z.shape[-1:], weight, bias)


def taut(p, x, residual, weight, bias, x_bias):
    return dropout_add_norm(x, residual, weight, bias, x_bias=x_bias, dropout=Dropout(p, seed=1))


@torch.no_grad()
def raw_ops(p, x, residual, weight, bias, x_bias, dy):
    """The two raw ops without autograd around them: what is left of its cost is Python's."""
    where = (p, 1, 0, 0, None, None)
    _, xhat, rstd, _ = torch.ops.taut.norm_fwd(
        x, residual, x_bias, weight, bias, 1e-5, False, False, *where
    )
    return torch.ops.taut.norm_bwd(dy, None, xhat, rstd, weight, False, True, True, True, *where)


def main(device: str) -> None:
    report = Report("norm", device)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES[device]:
            for p in (0.1, 0.0):
                gen = torch.Generator(device).manual_seed(0)
                draw = partial(torch.randn, dtype=dtype, device=device, generator=gen)
                x, residual, dy = draw(shape), draw(shape), draw(shape)
                weight, bias, x_bias = (torch.nn.Parameter(draw(shape[1])) for _ in range(3))
                dropout = Dropout(p, seed=1)
                assert_accurate(  # never time a wrong kernel
                    lambda x, r, w, b, x_bias, f=dropout_add_norm, d=dropout: f(
                        x, r, w, b, x_bias=x_bias, dropout=d
                    ),
                    lambda x, r, w, b, x_bias, f=dropout_add_norm_reference, d=dropout: f(
                        x, r, w, b, x_bias=x_bias, dropout=d
                    ),
                    (x[:64], residual[:64], weight, bias, x_bias),
                    dy[:64],
                )
                inputs = (x.requires_grad_(), residual.requires_grad_(), weight, bias, x_bias)

                def step(f, inputs=inputs, dy=dy):
                    return torch.autograd.grad(f(*inputs), inputs, dy)

                variants = {
                    "eager": partial(plain, p),
                    "compiled": compiled(partial(plain, p)),
                    "taut": partial(taut, p),
                }
                steps = {name: partial(step, f) for name, f in variants.items()}
                steps["raw ops"] = partial(raw_ops, p, *inputs, dy)
                # forward reads 2, writes 2; backward reads 2, writes 1 or, with dropout, 2
                moved = (8 if p else 7) * dy.nbytes
                report.compare(
                    f"dropout_add_norm {shape} {dtype} p={p}",
                    steps,
                    bytes_moved=moved,
                    saved={name: saved_bytes(f, *inputs) for name, f in variants.items()},
                    targets=TARGETS[device, p > 0],
                )
    report.write()


if __name__ == "__main__":
    main(device_from_arguments(__doc__))
