"""linear forward + backward at BERT shapes.  python -m benchmarks.bench_linear [--device cuda]"""

from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.harness import Report, compiled, device_from_arguments
from taut.ops import linear
from taut.ops.linear import column_sum, linear_reference, probe
from taut.testing import assert_accurate

SHAPES = [(768, 768), (768, 3072), (3072, 768)]  # (D, F)
ROWS = {"cpu": 2048, "cuda": 16384}


def main(device: str) -> None:
    report = Report("linear", device)
    rows = ROWS[device]
    if device == "cpu":
        report.note("probe", use_onednn=probe().use_onednn, reason=probe().reason)
    for dtype in (torch.float32, torch.bfloat16):
        for width_in, width_out in SHAPES:
            draw = partial(torch.randn, dtype=dtype, device=device)
            x, dy = draw(rows, width_in), draw(rows, width_out)
            weight, bias = draw(width_out, width_in) / 32, draw(width_out)
            # oneDNN sums K products in one chain, MKL in up to 16: sqrt(16) times the rounding
            factor = 5 if dtype == torch.float32 else 2
            assert_accurate(linear, linear_reference, (x[:64], weight, bias), dy[:64], factor)
            inputs = [t.requires_grad_() for t in (x, weight, bias)]

            def step(f, inputs=inputs, dy=dy):
                return torch.autograd.grad(f(*inputs), inputs, dy)

            report.compare(
                f"linear {rows} x {width_in} -> {width_out} {dtype}",
                {
                    "eager": partial(step, F.linear),
                    "compiled": partial(step, compiled(F.linear)),
                    "taut": partial(step, linear),
                },
                flops=6 * rows * width_in * width_out,
                # elsewhere the GEMM is PyTorch's own
                targets={"eager": 1.7} if dtype == torch.float32 and device == "cpu" else None,
                rounds=5,
            )
    x = torch.randn(rows, 3072, dtype=torch.bfloat16, device=device)
    report.compare(
        f"column sum ({rows}, 3072) bf16, the bias gradient",
        {
            "eager": lambda: x.sum(0, dtype=torch.float32),
            "compiled": partial(compiled(lambda x: x.sum(0, dtype=torch.float32)), x),
            "taut": lambda: column_sum(x),
        },
        bytes_moved=x.nbytes,
        targets={"eager": 1.0},
    )
    report.write()


if __name__ == "__main__":
    main(device_from_arguments(__doc__))
