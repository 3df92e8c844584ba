"""GPT-2: a causal pre-norm decoder with a tied head.

    s = dropout(token + position);  blocks;  norm;  head

A row's target is what follows it, as `next_token_targets` gives; for classification (head
"sequence") the target of a sequence stands at its last token, which alone has seen all of it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from taut import ops
from taut.nn.blocks import Layout, affine, first_norm
from taut.packed import PackedBatch

from .base import BlockConfig, Model, head_loss, pooled, require_targets_at
from .loss import Loss


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(BlockConfig):
    """GPT-2 small, or what `named` gives."""

    vocab_size: int = 50257
    max_positions: int = 1024
    activation: str = "gelu_tanh"
    head: str = "lm"  # none, lm, sequence
    num_labels: int = 2

    HEADS: ClassVar = ("none", "lm", "sequence")
    NAMED: ClassVar[dict[str, dict[str, Any]]] = {
        "gpt2": {},
        "gpt2-medium": {"hidden_size": 1024, "num_layers": 24, "num_heads": 16},
        "gpt2-large": {"hidden_size": 1280, "num_layers": 36, "num_heads": 20},
        "gpt2-xl": {"hidden_size": 1600, "num_layers": 48, "num_heads": 25},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("head", self.HEADS)


class Gpt2(Model):
    """model(batch) is the Loss of its head, model.encode(batch) the hidden states (T, D)."""

    config: Gpt2Config

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.blocks = config.blocks(1, is_pre_norm=True, causal=True)
        if config.head == "sequence":
            self.classifier = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.init_weights()

    def init_weights(self, seed: int | None = None) -> "Gpt2":
        super().init_weights(seed)
        shrunk = 1 / math.sqrt(2 * len(self.blocks))  # so that the stream does not grow with depth
        with torch.no_grad():
            for block in self.blocks:
                block.attention.out.weight.mul_(shrunk)
                block.mlp.down.weight.mul_(shrunk)
        return self

    def flops_per_token(self, length: float, targets: float = 1.0) -> float:
        blocks = self.blocks.flops(length)
        head = self.tokens.weight.numel() if self.config.head == "lm" else 0
        return blocks + 6 * head * targets

    def encode(self, batch: PackedBatch, *, seed: int | None = None, step: int = 0) -> Tensor:
        """The hidden states of all tokens behind the last norm, (T, D)."""
        return self._encode(batch, self.layout(batch, seed, step))

    def _encode(self, batch: PackedBatch, layout: Layout) -> Tensor:
        x = ops.embedding(
            batch.tokens,
            self.tokens.weight,
            positions=batch.positions,
            position_weight=self.positions.weight,
            dropout=layout.dropout(self.config.dropout, 0),
        )
        state = first_norm(x, *affine(self.norm), self.config.norm_eps)
        return self.blocks(state, layout).x

    def forward(self, batch: PackedBatch, *, seed: int | None = None, step: int = 0) -> Loss:
        """The loss at the batch's targets."""
        if self.config.head == "none":
            raise ValueError("Gpt2: without a head there is no loss; use encode")
        x = self.encode(batch, seed=seed, step=step)
        rows = batch.target_rows
        if self.config.head == "lm":
            return head_loss(x[rows], self.tokens.weight, batch.targets[rows])
        require_targets_at("Gpt2", "last token of a sequence", rows, batch.ends[rows])
        return head_loss(x[rows], self.classifier.weight, batch.targets[rows])

    def predict(self, batch: PackedBatch) -> Tensor:
        """Logits without dropout: (T, V) of lm, (B, labels) of sequence. A sequence without tokens
        gets zeros."""
        if self.config.head == "none":
            raise ValueError("Gpt2: without a head there are no logits; use encode")
        x = self._encode(batch, Layout.of(batch))
        if self.config.head == "lm":
            return ops.linear(x, self.tokens.weight)
        return ops.linear(pooled(x, batch.cu_seqlens[1:] - 1, batch), self.classifier.weight)


def next_token_targets(batch: PackedBatch) -> PackedBatch:
    """The batch with each token's target the next one; the last of a sequence has none."""
    following = batch.tokens.roll(-1).long().masked_fill(batch.ends, -100)
    return replace(batch, targets=following)
