"""Attention of mixed lengths, forward + backward: one launch over all tiles, and as the unpadded
BERT of 2022 did it, by length class with tile sizes and a stream for each class.

python -m benchmarks.bench_attention_grouped --device cuda
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Report, device_from_arguments
from taut.ops import Dropout
from taut.ops.random import attention_arguments
from taut.testing import assert_accurate

HEADS, WIDTH = 12, 64
BATCHES = (32, 128)  # sequences: less than a wave of blocks, and several
CLASSES = (128, 256, 384, 512)  # and longer
# Blocks of a class: short sequences fill small tiles only.
FORWARD = [(64, 128, 4, 2)] + 4 * [(128, 128, 8, 2)]
BACKWARD_Q = [(64, 64, 4, 2)] + 4 * [(128, 64, 8, 2)]
BACKWARD_K = [(32, 64, 4, 2)] + 4 * [(64, 128, 8, 2, True)]


def class_of(length: int) -> int:
    return sum(length > edge for edge in CLASSES)


def tiles_of(lengths: list[int], sequences: list[int], block: int, device: str) -> Tensor:
    """(tiles, 2): sequence and number of each tile of these sequences, longest first."""
    ordered = sorted(sequences, key=lambda i: -lengths[i])
    tiles = [(i, tile) for i in ordered for tile in range(-(-lengths[i] // block))]
    return torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 2)


class Grouped:
    """Both passes for sequences of lengths that the host knows; streams where there is a GPU."""

    def __init__(self, lengths: list[int], device: str, tables: Any) -> None:
        from taut.ops.triton.attention import Blocks

        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        self.cu_seqlens = offsets, offsets
        classes = [class_of(n) for n in lengths]
        self.groups = []
        for number in sorted(set(classes)):
            sequences = [i for i, c in enumerate(classes) if c == number]
            blocks = [Blocks(*table[number]) for table in tables]
            sizes = (blocks[0].queries, blocks[1].queries, blocks[2].keys)
            tiles = [tiles_of(lengths, sequences, size, device) for size in sizes]
            stream = torch.cuda.Stream() if device == "cuda" else None
            self.groups.append((stream, *zip(tiles, blocks, strict=True)))

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _join(self) -> None:
        for stream, *_ in self.groups:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float, *where: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from taut.ops.triton.attention import launch_fwd
        from taut.ops.triton.attention_bwd import launch_bwd_kv, launch_bwd_q, new_statistics

        arguments = (*self.cu_seqlens, False, scale, *where)
        out, dq, dk, dv = (torch.empty_like(x) for x in (q, q, k, v))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        statistics = new_statistics(q)
        for stream, forward, _, _ in self.groups:
            with self._on(stream):
                launch_fwd((q, k, v, out, lse), *forward, *arguments)
        self._join()
        for stream, _, backward_q, backward_k in self.groups:
            with self._on(stream):
                tensors = (q, k, v, dout, out, lse, statistics, dq)
                launch_bwd_q(tensors, *backward_q, *arguments)
                launch_bwd_kv((q, k, v, dout, statistics, dk, dv), *backward_k, *arguments)
        self._join()
        return out, dq, dk, dv


@torch.no_grad()
def one_launch(
    cu_seqlens: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float, *where: Any
) -> tuple[Tensor, ...]:
    arguments = (cu_seqlens, cu_seqlens, False, scale, *where)
    out, lse = torch.ops.taut.attention_fwd(q, k, v, *arguments)
    return out, *torch.ops.taut.attention_bwd(dout, q, k, v, out, lse, *arguments)


def draw_lengths(batch: int) -> list[int]:
    """As in Wikipedia cut at 512: a fifth is full, the mean half of it."""
    gen = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 381, (batch,), generator=gen)
    lengths[torch.rand(batch, generator=gen) < 0.2] = 512
    return lengths.tolist()


def inputs_of(lengths: list[int]) -> list[Tensor]:
    """q, k and v as views of one projection, and dout."""
    gen = torch.Generator("cuda").manual_seed(0)
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=gen)
    return [*draw(sum(lengths), 3, HEADS, WIDTH).unbind(1), draw(sum(lengths), HEADS, WIDTH)]


def main(device: str) -> None:
    if device != "cuda":
        print("attention_grouped: needs a GPU; on a CPU there is one form")
        return
    report = Report("attention_grouped", device)
    tables = (FORWARD, BACKWARD_Q, BACKWARD_K)
    for p in (0.0, 0.1):
        for batch in BATCHES:
            lengths = draw_lengths(batch)
            q, k, v, dout = inputs_of(lengths)
            where = attention_arguments("attention", Dropout(p, seed=1), q, k)
            rest = (WIDTH**-0.5, *where)
            some = Grouped(lengths[:8], device, tables)
            cut = [x[: sum(lengths[:8])] for x in (q, k, v, dout)]
            with torch.no_grad():  # never time a wrong kernel
                assert_accurate(some, partial(one_launch, some.cu_seqlens[0]), [*cut, *rest])
            grouped = Grouped(lengths, device, tables)
            steps = {
                "taut": partial(one_launch, grouped.cu_seqlens[0], q, k, v, dout, *rest),
                "grouped": partial(grouped, q, k, v, dout, *rest),
            }
            # two products forward, five backward, and two again for dq
            flops = 9 * 2 * HEADS * WIDTH * sum(n * n for n in lengths)
            report.compare(f"{batch} sequences, {sum(lengths)} tokens, p={p}", steps, flops=flops)
    report.write()


if __name__ == "__main__":
    main(device_from_arguments(__doc__))
