"""embedding forward + backward, BERT's form.  python -m benchmarks.bench_embedding [--device cuda]

Most of the time goes to the gradient of the token table, whose memory is fresh in every step:
"zeros" makes a table of zeros alone. "taut buffer" adds the gradient to a buffer that is kept.
"""

from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.harness import Report, compiled, device_from_arguments
from taut.ops import Dropout, embedding
from taut.ops.embedding import embedding_reference
from taut.testing import assert_accurate, saved_bytes

VOCABULARY, WIDTH, POSITIONS, TYPES = 30522, 768, 512, 2  # BERT-base
TOKENS = {"cpu": (2048, 4096), "cuda": (8192, 32768)}
TARGETS = {
    "cpu": {"eager": 3, "compiled": 3},
    "cuda": {},
}
P = 0.1


def plain(ids, positions, types, weight, position_weight, type_weight, norm_weight, norm_bias):
    z = F.embedding(ids, weight) + F.embedding(positions, position_weight)
    z = z + F.embedding(types, type_weight)
    return F.dropout(F.layer_norm(z, z.shape[-1:], norm_weight, norm_bias), P)


def of_tensors(form):
    """A form of the op, called as plain is."""

    def run(ids, positions, types, *tables, **kwargs):
        weight, position_weight, type_weight, norm_weight, norm_bias = tables
        return form(
            ids,
            weight,
            positions=positions,
            position_weight=position_weight,
            types=types,
            type_weight=type_weight,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            dropout=Dropout(P, seed=1),
            **kwargs,
        )

    return run


def main(device: str) -> None:
    report = Report("embedding", device)
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in TOKENS[device]:
            gen = torch.Generator(device).manual_seed(0)
            draw = partial(torch.randn, dtype=dtype, device=device, generator=gen)
            # as words in a text: the n-th id is seen n times less often than the first
            uniform = torch.rand(tokens, device=device, generator=gen)
            ids = (VOCABULARY**uniform).long() - 1
            row = torch.arange(tokens, device=device)
            indices = (ids, row % POSITIONS, row % POSITIONS // (POSITIONS // 2))
            shapes = ((VOCABULARY, WIDTH), (POSITIONS, WIDTH), (TYPES, WIDTH), (WIDTH,), (WIDTH,))
            tables = [torch.nn.Parameter(draw(*shape)) for shape in shapes]
            dy = draw(tokens, WIDTH)
            few = tuple(index[:64] for index in indices)
            assert_accurate(  # never time a wrong kernel
                partial(of_tensors(embedding), *few),
                partial(of_tensors(embedding_reference), *few),
                tables,
                dy[:64],
            )

            def step(f, indices=indices, tables=tables, dy=dy):
                return torch.autograd.grad(f(*indices, *tables), tables, dy, allow_unused=True)

            buffer = torch.zeros_like(tables[0])
            variants = {
                "eager": plain,
                "compiled": compiled(plain),
                "taut": of_tensors(embedding),
                "taut buffer": partial(of_tensors(embedding), weight_grad=buffer),
            }
            steps = {name: partial(step, f) for name, f in variants.items()}
            steps["zeros"] = partial(torch.zeros_like, buffer)
            report.compare(
                f"embedding {tokens} of {VOCABULARY} x {WIDTH} {dtype} p={P}",
                steps,
                # forward reads 1, writes 2; backward reads 2 and writes the table
                bytes_moved=5 * dy.nbytes + buffer.nbytes,
                saved={name: saved_bytes(f, *indices, *tables) for name, f in variants.items()},
                targets=TARGETS[device],
                rounds=6,
            )
    report.write()


if __name__ == "__main__":
    main(device_from_arguments(__doc__))
