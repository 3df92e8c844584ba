"""Attention that gives its probabilities, forward + backward.

python -m benchmarks.bench_softmax_attention [--device cuda]
"""

from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.harness import Report, compiled, device_from_arguments
from taut.ops import Dropout, softmax_attention
from taut.ops.softmax_attention import softmax_attention_reference
from taut.testing import assert_accurate, saved_bytes

SHAPES = {  # (B, H, L, E)
    "cpu": [(8, 12, 256, 64), (4, 12, 512, 64)],
    "cuda": [(32, 12, 512, 64), (8, 16, 2048, 64)],
}


def scores(q, k):
    return (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)


def plain(p, q, k, v):
    probabilities = scores(q, k).softmax(-1)
    return F.dropout(probabilities, p) @ v, probabilities


def taut(p, q, k, v):
    return softmax_attention(scores(q, k), v, dropout=Dropout(p, seed=1))


def heads(shape, dtype, device, generator):
    """As a projection leaves them: (B, L, H, E) in memory."""
    batch, num_heads, length, width = shape
    return torch.randn(
        (batch, length, num_heads, width), dtype=dtype, device=device, generator=generator
    ).transpose(1, 2)


def main(device: str) -> None:
    report = Report("softmax_attention", device)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES[device]:
            for p in (0.1, 0.0):
                gen = torch.Generator(device).manual_seed(0)
                q, k, v, dout = (heads(shape, dtype, device, gen) for _ in range(4))
                few = scores(q[:2, :2, :64], k[:2, :2])
                dropout = Dropout(p, seed=1)
                assert_accurate(  # never time a wrong kernel
                    partial(softmax_attention, dropout=dropout),
                    partial(softmax_attention_reference, dropout=dropout),
                    (few, v[:2, :2]),
                )
                inputs = [x.requires_grad_() for x in (q, k, v)]

                def step(f, inputs=inputs, dout=dout):
                    out, _ = f(*inputs)
                    return torch.autograd.grad(out, inputs, dout)

                variants = {
                    "eager": partial(plain, p),
                    "compiled": compiled(partial(plain, p)),
                    "taut": partial(taut, p),
                }
                num_heads = shape[0] * shape[1]
                report.compare(
                    f"softmax_attention {shape} {dtype} p={p}",
                    {name: partial(step, f) for name, f in variants.items()},
                    flops=6 * 2 * num_heads * shape[2] ** 2 * shape[3],
                    saved={name: saved_bytes(f, *inputs) for name, f in variants.items()},
                    targets={"eager": 1.0},
                    rounds=6,  # of tenths of a second where PyTorch draws its dropout
                )
    report.write()


if __name__ == "__main__":
    main(device_from_arguments(__doc__))
