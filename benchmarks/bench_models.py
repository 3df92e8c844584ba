"""Whole training steps (forward, backward, AdamW) against transformers and torch.nn.Transformer.

python -m benchmarks.bench_models [bert gpt2 transformer vit]

Every variant keeps fp32 weights: taut as bf16 and 16 bits more, peers and taut.accelerate as they
are, with torch's fused AdamW. taut computes in bf16; peers compute in fp32, in fp32 with GEMMs in
bf16, or under autocast to bf16. The floor is the matrix products alone.
"""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Report, compiled
from taut import PackedBatch, accelerate, models
from taut.models.base import Model
from taut.optim import AdamW

BERT_LENGTHS = [256, 256, 256, 128, 96, 77, 50, 25]  # 1,144 of 2,048 tokens are real
GPT2_LENGTHS = [512, 384, 256, 180, 111, 60]  # 1,503 of 3,072
LAYERS, P = 4, 0.1
ROUNDS = 3
ACCELERATED = "taut.accelerate, autocast"
TARGETS = {"bert": (4, 10), "gpt2": (3.5, 0), "transformer": (3.5, 0), "vit": (1.4, 0)}


def peer_steps(
    make: Callable[[], nn.Module], loss_of: Callable[[Any], Tensor], is_ours: bool = True
) -> dict[str, Any]:
    """The variants of a model: loss_of(model) is its loss."""

    def variant(
        autocast: bool = False,
        fp32: str = "ieee",
        is_compiled: bool = False,
        is_accelerated: bool = False,
    ) -> Any:
        model = make().train()
        if is_accelerated:
            accelerate(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run = compiled(loss_of) if is_compiled else loss_of

        def step() -> None:
            torch.backends.mkldnn.matmul.fp32_precision = fp32
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = run(model)
            loss.backward()
            torch.backends.mkldnn.matmul.fp32_precision = "ieee"
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {
        "eager fp32": variant(),
        "fp32, bf16 GEMMs": variant(fp32="bf16"),
        "eager autocast": variant(autocast=True),
        "compiled autocast": variant(autocast=True, is_compiled=True),
    } | ({ACCELERATED: variant(autocast=True, is_accelerated=True)} if is_ours else {})


def our_step(model: Model, loss_of: Callable[[int], models.Loss]) -> Callable[[], None]:
    """A step in bf16; the optimizer keeps the other 16 bits of each weight."""
    optimizer = AdamW(model.to(torch.bfloat16).parameters(), lr=1e-4)
    count = iter(range(2**31))

    def step() -> None:
        loss_of(next(count)).mean.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def floor_step(model: Model, rows: int, head_rows: int, vocab: int) -> Callable[[], None]:
    """The GEMMs of a step, forward and backward, of every linear on `rows` and of the head."""
    shapes = [(rows, m.in_features, m.out_features) for m in linears(model)]
    if head_rows:
        shapes.append((head_rows, model.config.hidden_size, vocab))
    products = [
        [torch.randn(shape, dtype=torch.bfloat16) for shape in ((t, i), (o, i), (t, o))]
        for t, i, o in shapes
    ]

    def step() -> None:
        for x, weight, dy in products:
            F.linear(x, weight)
            dy @ weight
            dy.t() @ x

    return step


def linears(model: Model) -> Iterable[nn.Linear]:
    names = ("blocks", "encoder", "decoder", "cross_kv")
    for name in names:
        if hasattr(model, name):
            yield from (m for m in getattr(model, name).modules() if isinstance(m, nn.Linear))


def texts(lengths: list[int], vocab: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randint(5, vocab, (n,), generator=gen) for n in lengths]


def pad(rows: list[Tensor], value: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def bert(report: Report) -> None:
    rows = texts(BERT_LENGTHS, 30522)
    gen = torch.Generator().manual_seed(1)
    targets = [x.masked_fill(torch.rand(len(x), generator=gen) > 0.15, -100) for x in rows]
    mask = pad([torch.ones_like(x) for x in rows], 0)
    padded = {"input_ids": pad(rows, 0), "attention_mask": mask, "labels": pad(targets, -100)}
    config = transformers.BertConfig(num_hidden_layers=LAYERS)
    steps = peer_steps(lambda: transformers.BertForMaskedLM(config), lambda m: m(**padded).loss)
    batch = PackedBatch.from_sequences(rows, targets)
    model = models.Bert(models.BertConfig(num_layers=LAYERS, dropout=P)).train()
    floor = floor_step(model, batch.num_tokens, len(batch.target_rows), 30522)
    taut = our_step(model, lambda step: model(batch, seed=0, step=step))
    judge(report, "bert", "BERT-base width, 4 layers, 8 sequences to 256", steps, taut, floor)


def gpt2(report: Report) -> None:
    rows = texts(GPT2_LENGTHS, 50257)
    mask = pad([torch.ones_like(x) for x in rows], 0)
    padded = {"input_ids": pad(rows, 0), "attention_mask": mask, "labels": pad(rows, -100)}
    config = transformers.GPT2Config(n_layer=LAYERS, use_cache=False)
    steps = peer_steps(lambda: transformers.GPT2LMHeadModel(config), lambda m: m(**padded).loss)
    batch = models.next_token_targets(PackedBatch.from_sequences(rows))
    model = models.Gpt2(models.Gpt2Config(num_layers=LAYERS, dropout=P)).train()
    floor = floor_step(model, batch.num_tokens, len(batch.target_rows), 50257)
    taut = our_step(model, lambda step: model(batch, seed=0, step=step))
    judge(report, "gpt2", "GPT-2 small width, 4 layers, 6 documents to 512", steps, taut, floor)


class Seq2Seq(nn.Module):
    """torch.nn.Transformer with the embeddings and the tied head that it leaves to others."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, 512)
        self.positions = nn.Embedding(512, 512)
        self.core = nn.Transformer(512, 8, LAYERS, LAYERS, 2048, P, batch_first=True)
        self.drop = nn.Dropout(P)

    def forward(self, source: Tensor, inputs: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        def embed(ids: Tensor) -> Tensor:
            return self.drop(self.tokens(ids) + self.positions.weight[: ids.shape[1]])

        causal = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        y = self.core(
            embed(source),
            embed(inputs),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        logits = F.linear(y, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def transformer(report: Report) -> None:
    vocab = 32000
    gen = torch.Generator().manual_seed(0)
    lengths = (31 + 12 * torch.randn(2, 32, generator=gen)).round().clamp(4, 64).int().tolist()
    sources, targets = (texts(row, vocab - 1) for row in lengths)
    start = torch.tensor([vocab - 1])
    inputs = [torch.cat([start, x[:-1]]) for x in targets]
    mask = pad([torch.ones_like(x) for x in sources], 0)
    labels = pad(targets, -100)
    padded = {"input_ids": pad(sources, vocab - 1), "attention_mask": mask, "labels": labels}
    config = transformers.MarianConfig(
        vocab_size=vocab,
        d_model=512,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        dropout=P,
        attention_dropout=P,
        pad_token_id=vocab - 1,
        decoder_start_token_id=vocab - 1,
        activation_function="relu",
        max_position_embeddings=512,
        use_cache=False,
    )
    steps = peer_steps(lambda: transformers.MarianMTModel(config), lambda m: m(**padded).loss)
    given = pad(sources, 0), pad(inputs, 0), labels, mask == 0
    plain = peer_steps(lambda: Seq2Seq(vocab), lambda m: m(*given), is_ours=False)
    steps |= {f"torch.nn, {name}": step for name, step in plain.items()}
    batches = PackedBatch.from_sequences(sources), PackedBatch.from_sequences(inputs, targets)
    model = models.Transformer(
        models.TransformerConfig(num_layers=LAYERS, dropout=P, label_smoothing=0.0)
    ).train()
    floor = floor_step(model, batches[0].num_tokens, batches[1].num_tokens, vocab)
    taut = our_step(model, lambda step: model(*batches, seed=0, step=step))
    judge(report, "transformer", "Transformer-base width, 4+4 layers, 32 pairs", steps, taut, floor)


def vit(report: Report) -> None:
    gen = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 224, 224, generator=gen)
    labels = torch.randint(0, 1000, (8,), generator=gen)
    config = transformers.ViTConfig(num_hidden_layers=LAYERS, num_labels=1000)
    steps = peer_steps(
        lambda: transformers.ViTForImageClassification(config),
        lambda m: m(pixel_values=images, labels=labels).loss,
    )
    model = models.Vit(models.VitConfig(num_layers=LAYERS)).train()
    batch = model.pack(list(images), labels.tolist())
    floor = floor_step(model, batch.num_tokens, 0, 0)
    taut = our_step(model, lambda step: model(batch, seed=0, step=step))
    judge(report, "vit", "ViT-B/16 width, 4 layers, 8 images", steps, taut, floor)


def judge(
    report: Report, name: str, case: str, steps: dict[str, Any], taut: Any, floor: Any
) -> None:
    fastest, eager = TARGETS[name]
    peers = [name for name in steps if name != ACCELERATED]
    targets = dict.fromkeys(peers, fastest)
    if eager:
        targets["eager fp32"] = eager
    every = {"taut": taut, "GEMMs alone": floor} | steps
    best = report.compare(case, every, targets=targets, rounds=ROUNDS)
    peer = min(peers, key=lambda step: best[step])
    report.note(
        f"{case}: against the fastest",
        variant=peer,
        times_as_long=round(best[peer] / best["taut"], 3),
        target=fastest,
        met=best[peer] / best["taut"] >= fastest,
        times_as_long_as_accelerated=round(best[peer] / best[ACCELERATED], 3),
        part_in_gemms=round(best["GEMMs alone"] / best["taut"], 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", help="default: all")
    chosen = parser.parse_args().which or list(TARGETS)
    transformers.logging.set_verbosity_error()
    for name in chosen:
        report = Report(f"models_{name}", "cpu")
        {"bert": bert, "gpt2": gpt2, "transformer": transformer, "vit": vit}[name](report)
        report.write()


if __name__ == "__main__":
    main()
