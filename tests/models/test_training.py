"""200 steps of each model follow a twin in plain PyTorch, written here from torch.nn's layers."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from taut import PackedBatch
from taut.models import (
    Bert,
    BertConfig,
    Gpt2,
    Gpt2Config,
    Transformer,
    TransformerConfig,
    Vit,
    VitConfig,
    next_token_targets,
)

STEPS, WIDTH, HEADS = 200, 16, 2
SMALL = {"hidden_size": WIDTH, "num_layers": 2, "num_heads": HEADS, "dropout": 0.0}


def attend(q, k, v, causal):
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1).flatten(1)


def block(p, x, causal=False, memory=None):
    """One block on one sequence (S, D), with our parameters and PyTorch's functions."""
    options = p.options
    act = {"gelu": F.gelu, "relu": F.relu}.get(
        options.activation, lambda u: F.gelu(u, approximate="tanh")
    )
    stream, x = x if options.is_pre_norm else (x, x)

    def close(y, stream, norm):
        total = stream + y
        return total, norm(total)

    q, k, v = p.attention.qkv(x).chunk(3, -1)
    stream, x = close(p.attention.out(attend(q, k, v, causal)), stream, p.attention_norm)
    stream = stream if options.is_pre_norm else x
    if memory is not None:
        stream, x = close(p.cross.out(attend(p.cross.q(x), *memory, False)), stream, p.cross_norm)
        stream = stream if options.is_pre_norm else x
    stream, x = close(p.mlp.down(act(p.mlp.up(x))), stream, p.mlp_norm)
    return (stream, x) if options.is_pre_norm else x


def run_pre_norm(model, stream, causal):
    state = stream, model.norm(stream)
    for p in model.blocks:
        state = block(p, state, causal)
    return state[1]


def bert_twin(model, batch):
    total = 0
    for tokens, targets in sequences(batch):
        x = model.tokens(tokens) + model.positions.weight[: len(tokens)] + model.types.weight[0]
        x = model.norm(x)
        for p in model.blocks:
            x = block(p, x)
        kept = targets != -100
        h = F.gelu(model.mlm.transform(x[kept]))
        h = F.layer_norm(h, (WIDTH,), model.mlm.norm.weight, model.mlm.norm.bias, 1e-12)
        logits = F.linear(h, model.tokens.weight, model.mlm.bias)
        total = total + F.cross_entropy(logits, targets[kept], reduction="sum")
    return total / (batch.targets != -100).sum()


def gpt2_twin(model, batch):
    total = 0
    for tokens, targets in sequences(batch):
        x = model.tokens(tokens) + model.positions.weight[: len(tokens)]
        x = run_pre_norm(model, x, causal=True)
        logits = F.linear(x, model.tokens.weight)
        total = total + F.cross_entropy(logits, targets, reduction="sum")
    return total / (batch.targets != -100).sum()


def vit_twin(model, batch):
    logits, labels = [], []
    for pixels, targets in sequences(batch):
        x = model.patches(pixels[1:])
        x = torch.cat([model.class_token[None], x]) + model.positions.weight
        logits.append(model.classifier(run_pre_norm(model, x, causal=False)[0]))
        labels.append(targets[0])
    return F.cross_entropy(torch.stack(logits), torch.stack(labels))


def transformer_twin(model, source, target):
    rates = 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    weight, total = model.target_embedder.tokens.weight, 0

    def embed(ids):
        angles = torch.arange(len(ids))[:, None] * rates
        places = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        return weight[ids] * math.sqrt(WIDTH) + places

    def run(stack, x, norm, kv=None):
        is_pre_norm = model.config.is_pre_norm
        x = (x, getattr(model, norm)(x)) if is_pre_norm else x
        for i, p in enumerate(stack):
            x = block(p, x, kv is not None, kv[2 * i : 2 * i + 2] if kv else None)
        return x[1] if is_pre_norm else x

    for (src, _), (tgt, targets) in zip(sequences(source), sequences(target), strict=True):
        x = run(model.encoder, embed(src), "encoder_norm")
        kv = model.cross_kv(x).unflatten(-1, (2 * len(model.decoder), WIDTH)).unbind(1)
        y = run(model.decoder, embed(tgt), "decoder_norm", kv)
        logits = F.linear(y, weight)
        # PyTorch gives a target a share of what it takes from it, fairseq does not
        eps = model.config.label_smoothing * len(weight) / (len(weight) - 1)
        total = total + F.cross_entropy(logits, targets, reduction="sum", label_smoothing=eps)
    return total / (target.targets != -100).sum()


def sequences(batch):
    for piece in batch.split(1):
        yield piece.tokens, piece.targets


def text(gen, vocab, lengths):
    """Rows that count up: what follows can be learnt."""
    starts = torch.randint(0, vocab - 3, (len(lengths),), generator=gen)
    return [
        (start + torch.arange(n)) % (vocab - 3) + 3
        for start, n in zip(starts, lengths, strict=True)
    ]


def bert_case(gen):
    model = Bert(BertConfig(**SMALL, vocab_size=40, max_positions=20, norm_eps=1e-12))

    def batch():
        rows = text(gen, 40, [9, 3, 14])
        targets = [row.masked_fill(torch.rand(len(row), generator=gen) > 0.5, -100) for row in rows]
        return (PackedBatch.from_sequences(rows, targets),)

    return model, bert_twin, batch


def gpt2_case(gen):
    model = Gpt2(Gpt2Config(**SMALL, vocab_size=40, max_positions=20))
    return (
        model,
        gpt2_twin,
        lambda: (next_token_targets(PackedBatch.from_sequences(text(gen, 40, [9, 3, 14]))),),
    )


def vit_case(gen):
    model = Vit(VitConfig(**SMALL, image_size=16, patch_size=8, num_labels=3))

    def batch():
        images = list(torch.randn(4, 3, 16, 16, generator=gen))
        return (model.pack(images, [int(image.mean() > 0) for image in images]),)

    return model, vit_twin, batch


def transformer_case(gen, **fields):
    model = Transformer(
        TransformerConfig(**SMALL | {"vocab_size": 40, "label_smoothing": 0.0} | fields)
    )

    def batch():
        rows = text(gen, 40, [5, 9, 2])
        return PackedBatch.from_sequences(rows), model.target_batch([row.flip(0) for row in rows])

    return model, transformer_twin, batch


def pre_norm_case(gen):
    return transformer_case(gen, is_pre_norm=True, activation="gelu", label_smoothing=0.1)


@pytest.mark.parametrize("case", [bert_case, gpt2_case, vit_case, transformer_case, pre_norm_case])
def test_loss_curve_is_that_of_plain_pytorch(case):
    gen = torch.Generator().manual_seed(0)
    model, twin_loss, make_batch = case(gen)
    model.init_weights(0).train()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (model, twin)]
    curve = []
    for _ in range(STEPS):
        batch = make_batch()
        losses = model(*batch).mean, twin_loss(twin, *batch)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curve.append([float(loss.detach()) for loss in losses])
    ours, theirs = torch.tensor(curve).T
    assert (ours - theirs).abs().max() <= 1e-4
    assert ours[-20:].mean() < ours[:20].mean() - 0.05  # it learns, or equality would say little
