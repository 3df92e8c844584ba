"""Optimizer steps against torch's.  python -m benchmarks.bench_optimizer"""

import torch

from benchmarks.harness import Report, device_from_arguments
from taut.optim import AdamW, Lamb

# sizes of the parameters of 4 and of 12 layers of BERT-base width, without and with its table
LAYER = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
CASES = {"28 M": LAYER * 4, "110 M": [(30522, 768), *LAYER * 12]}


def parameters(sizes, dtype):
    gen = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=gen).to(dtype)) for s in sizes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return params


def clipped(params, optimizer):
    def step():
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def foreach_lamb(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, decay=1e-2):
    """LAMB as it is written with torch's operations on lists of tensors."""
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    count = 0

    @torch.no_grad()
    def step():
        nonlocal count
        count += 1
        grads = [p.grad for p in params]
        torch._foreach_lerp_(first, grads, 1 - betas[0])
        torch._foreach_mul_(second, betas[1])
        torch._foreach_addcmul_(second, grads, grads, 1 - betas[1])
        down = torch._foreach_sqrt(torch._foreach_div(second, 1 - betas[1] ** count))
        torch._foreach_add_(down, eps)
        updates = torch._foreach_div(torch._foreach_div(first, 1 - betas[0] ** count), down)
        torch._foreach_add_(updates, params, alpha=decay)
        ratios = torch._foreach_div(torch._foreach_norm(params), torch._foreach_norm(updates))
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(params, updates, alpha=-lr)

    return step


def main() -> None:
    report = Report("optimizer", device_from_arguments(__doc__))
    for name, sizes in CASES.items():
        ours, theirs, bare, bare_theirs = (parameters(sizes, torch.float32) for _ in range(4))
        narrow = parameters(sizes, torch.bfloat16)
        count = sum(p.numel() for p in ours)
        report.compare(
            f"global norm, clip, AdamW, {name} fp32",
            {
                "taut": AdamW(ours, max_norm=1.0).step,
                "torch": clipped(theirs, torch.optim.AdamW(theirs, fused=True)),
                "taut, bf16 and 16 bits": AdamW(narrow, max_norm=1.0).step,
            },
            targets={"torch": 1.2},
        )
        report.compare(
            f"AdamW alone, {name} fp32",
            {
                "taut": AdamW(bare).step,
                "torch": torch.optim.AdamW(bare_theirs, fused=True).step,
            },
            bytes_moved=28 * count,
            targets={"torch": 1.0, "copy": 0.8},
        )
    sizes = CASES["28 M"]
    ours, theirs = (parameters(sizes, torch.float32) for _ in range(2))
    report.compare(
        "LAMB, 28 M fp32",
        {"taut": Lamb(ours, max_norm=None).step, "foreach": foreach_lamb(theirs)},
        targets={"foreach": 3},
    )
    report.write()


if __name__ == "__main__":
    main()
