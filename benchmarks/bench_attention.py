"""attention forward + backward.  python -m benchmarks.bench_attention [--device cuda]"""

import subprocess
import sys
from functools import partial
from inspect import signature
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.harness import Report, device_from_arguments
from taut.ops import Dropout, attention
from taut.ops.attention import attention_reference
from taut.ops.linear import forward
from taut.testing import assert_accurate, saved_bytes

HEADS, WIDTH = 12, 64
# lengths of the MLPerf Wikipedia set, cut at 512: half of the tokens of a padded batch are real
WIKIPEDIA = [512, 512, 512, 384, 301, 256, 210, 180, 154, 128, 111, 96, 77, 60, 44, 25]
GEMM = (768, 3072)  # columns in and out of the floor: one GEMM of as many operations
# lengths, causal, p -> {dtype: times the peer's speed}
ON_CPU = {
    "8 x 256": ([256] * 8, False, 0.0, {torch.float32: 2.5, torch.bfloat16: 5}),
    "4 x 512": ([512] * 4, False, 0.0, {torch.float32: 2.5, torch.bfloat16: 5}),
    "8 x 256 p=0.1": ([256] * 8, False, 0.1, {torch.float32: 5, torch.bfloat16: 12}),
    "4 x 512 p=0.1": ([512] * 4, False, 0.1, {torch.float32: 5, torch.bfloat16: 12}),
    "wikipedia p=0.1": (WIKIPEDIA, False, 0.1, {torch.bfloat16: 20}),
    "4 x 1024 causal": ([1024] * 4, True, 0.0, {torch.bfloat16: 3}),
}
ON_GPU: dict[str, tuple[list[int], bool, float, dict]] = {
    "32 x 512": ([512] * 32, False, 0.0, {}),
    "32 x 512 p=0.1": ([512] * 32, False, 0.1, {}),
    "wikipedia": (WIKIPEDIA * 6, False, 0.0, {}),
    "wikipedia p=0.1": (WIKIPEDIA * 6, False, 0.1, {}),
    "8 x 2048 causal": ([2048] * 8, True, 0.0, {}),
}
CASES = {"cpu": ON_CPU, "cuda": ON_GPU}


def padded_sdpa(mask, batch, causal, p, q, k, v):
    """What an eager model does: (B, H, S, E) views of padded rows, a mask where lengths differ."""
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, p, causal)


def padding_mask(lengths, device):
    """(B, 1, 1, S), True where a key is real; none where all are."""
    if min(lengths) == max(lengths):
        return None
    seen = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return seen[:, None, None, :].to(device)


def packed(cu_seqlens, causal, p, q, k, v):
    return attention(q, k, v, cu_seqlens, causal=causal, dropout=Dropout(p, seed=1))


def varlen(cu_seqlens, longest, causal, q, k, v):
    """What torch has for packed sequences, on a GPU, without dropout."""
    from torch.nn.attention.varlen import varlen_attn

    mask = {"window_size": (-1, 0)} if causal else {}
    if "is_causal" in signature(varlen_attn).parameters:  # until torch 2.11
        mask = {"is_causal": causal}
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **mask)


def real_rows(lengths, device):
    """The places of real tokens in a padded batch."""
    starts = [i * max(lengths) for i in range(len(lengths))]
    rows = [torch.arange(n) + start for n, start in zip(lengths, starts, strict=True)]
    return torch.cat(rows).to(device)


def draw(shape, dtype, device, seed):
    gen = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, dtype=dtype, device=device, generator=gen)


def compare_case(report, name, dtype, device):
    lengths, causal, p, targets = CASES[device][name]
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    rows = real_rows(lengths, device)
    padded = [
        draw((len(lengths) * max(lengths), HEADS, WIDTH), dtype, device, i).requires_grad_()
        for i in range(3)
    ]
    inputs = [x.detach()[rows].requires_grad_() for x in padded]
    dout = draw(inputs[0].shape, dtype, device, 3)
    few = cu_seqlens[:2]  # never time a wrong kernel: the first sequence, against the reference
    assert_accurate(
        partial(packed, few, causal, p),
        lambda q, k, v: attention_reference(
            q, k, v, few, causal=causal, dropout=Dropout(p, seed=1)
        ),
        [x.detach()[: lengths[0], :2] for x in inputs],
        factor=3 if dtype == torch.float32 else 2,  # why 3: see tests/ops/catalogue.py
    )
    dpadded = draw((len(lengths), HEADS, max(lengths), WIDTH), dtype, device, 4)

    def step(form, tensors, dout):
        return torch.autograd.grad(form(*tensors), tensors, dout)

    peer, ours = (
        partial(padded_sdpa, padding_mask(lengths, device), len(lengths), causal, p),
        partial(packed, cu_seqlens, causal, p),
    )
    seen = sum(n * n // (2 if causal else 1) for n in lengths)
    flops = 14 * HEADS * WIDTH * seen  # seven products: two forward, and one of them again
    x = draw((flops // (2 * GEMM[0] * GEMM[1]), GEMM[0]), dtype, device, 5)
    weight = draw(GEMM[::-1], dtype, device, 6)
    targets = {"sdpa": targets[dtype]} if dtype in targets else {}
    if name == "4 x 512" and dtype == torch.bfloat16:
        targets["gemm"] = 0.4
    steps = {
        "sdpa": partial(step, peer, padded, dpadded),
        "taut": partial(step, ours, inputs, dout),
        "gemm": partial(forward, x, weight, None),
    }
    if device == "cuda" and p == 0 and dtype == torch.bfloat16:
        steps["varlen"] = partial(
            step, partial(varlen, cu_seqlens, max(lengths), causal), inputs, dout
        )
    report.compare(
        f"attention {name} {dtype}",
        steps,
        flops=flops,
        saved={"sdpa": saved_bytes(peer, *padded), "taut": saved_bytes(ours, *inputs)},
        targets=targets,
    )


def peak_extra_mib(tokens: int) -> float:
    """Of forward and backward of one sequence, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_attention", "--peak", str(tokens)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def memory_kib(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1])


def print_peak(tokens: int) -> None:
    def step(tokens):
        q, k, v = (draw((tokens, 2, WIDTH), torch.bfloat16, "cpu", i) for i in range(3))
        cu_seqlens = torch.tensor([0, tokens]).int()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory_kib("VmRSS")
        leaves = [x.requires_grad_() for x in (q, k, v)]
        attention(*leaves, cu_seqlens, dropout=Dropout(0.1, seed=1)).sum().backward()
        return memory_kib("VmHWM") - before

    step(512)  # threads, code and what else the first call brings
    print(step(tokens) / 1024)


def main(device: str) -> None:
    report = Report("attention", device)
    for dtype in (torch.float32, torch.bfloat16):
        for name in CASES[device]:
            compare_case(report, name, dtype, device)
    if device == "cpu":
        peaks = {tokens: peak_extra_mib(tokens) for tokens in (8192, 16384, 32768)}
        growth = (peaks[32768] - peaks[16384]) / (peaks[16384] - peaks[8192])
        report.note(
            "peak extra memory of one sequence, 2 heads, bf16",
            mib={str(tokens): round(peak, 1) for tokens, peak in peaks.items()},
            growth_of_the_last_doubling_over_the_one_before=round(growth, 2),  # linear: 2
            target=2.2,
            met=growth <= 2.2,
        )
    report.write()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        print_peak(int(sys.argv[2]))
    else:
        main(device_from_arguments(__doc__))
