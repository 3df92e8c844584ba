"""BERT, and RoBERTa as a config of it: a post-norm encoder, and a head on the rows with targets.

x = dropout(norm(token + position + type));  blocks;  head

head          reads                                   targets stand at
mlm           every token                             masked tokens
pretraining   mlm, and next sentence from the first   masked tokens; the first one of a sequence
token         every token                             any token
sequence      the first token                         the first one of a sequence
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from taut import ops
from taut.nn import LayerNorm
from taut.nn.blocks import SITES, Layout, State
from taut.ops.mlp import activate
from taut.packed import PackedBatch

from .base import BlockConfig, Model, head_loss, pooled, require_targets_at
from .loss import Loss


@dataclass(frozen=True, kw_only=True)
class BertConfig(BlockConfig):
    """BERT-base, or what `named` gives."""

    vocab_size: int = 30522
    max_positions: int = 512  # rows of the table of positions
    position_offset: int = 0  # the row of position 0
    num_types: int = 2  # 0: no table of types
    pad_id: int | None = 0  # a row of the table of tokens that is never trained
    head: str = "mlm"  # none, mlm, pretraining, sequence, token
    num_labels: int = 2
    head_dropout: float | None = None  # in front of a classifier; None: as dropout
    has_pooler: bool = False  # beside a head that does not read it
    mlm_activation: str | None = None  # of the mlm head; None: as activation
    has_pooler_dropout: bool = False  # a dropout in front of the pooler too, as in RoBERTa
    norm_eps: float = 1e-12

    HEADS: ClassVar = ("none", "mlm", "pretraining", "sequence", "token")
    NAMED: ClassVar[dict[str, dict[str, Any]]] = {
        "bert-base": {},
        "bert-large": {"hidden_size": 1024, "num_layers": 24, "num_heads": 16},
        "bert-small": {"hidden_size": 512, "num_layers": 4, "num_heads": 8},
        "bert-tiny": {"hidden_size": 128, "num_layers": 2, "num_heads": 2},
        "roberta-base": {
            "vocab_size": 50265,
            "max_positions": 514,
            "position_offset": 2,
            "num_types": 1,
            "pad_id": 1,
            "norm_eps": 1e-5,
            "mlm_activation": "gelu",
            "has_pooler_dropout": True,
        },
    }
    NAMED["roberta-large"] = NAMED["roberta-base"] | NAMED["bert-large"]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("head", self.HEADS)
        if self.head_dropout is None:
            object.__setattr__(self, "head_dropout", self.dropout)


class Bert(Model):
    """model(batch) is the Loss of its head, model.encode(batch) the hidden states (T, D)."""

    config: BertConfig

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_positions, width)
        self.types = nn.Embedding(config.num_types, width) if config.num_types else None
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.blocks = config.blocks(1, is_pre_norm=False)
        if config.head in ("mlm", "pretraining"):
            self.mlm = MlmHead(config)
        if config.head in ("pretraining", "sequence") or config.has_pooler:
            self.pooler = nn.Linear(width, width)
        if config.head == "pretraining":
            self.classifier = nn.Linear(width, 2)
        elif config.head in ("sequence", "token"):
            self.classifier = nn.Linear(width, config.num_labels)
        self.init_weights()

    def init_weights(self, seed: int | None = None) -> "Bert":
        super().init_weights(seed)
        if self.config.pad_id is not None:
            nn.init.zeros_(self.tokens.weight[self.config.pad_id].detach())
        return self

    def flops_per_token(self, length: float, targets: float = 1.0) -> float:
        blocks = self.blocks.flops(length)
        head = 0
        if self.config.head in ("mlm", "pretraining"):
            head = self.mlm.transform.weight.numel() + self.tokens.weight.numel()
        return blocks + 6 * head * targets

    def encode(
        self,
        batch: PackedBatch,
        types: Tensor | None = None,
        *,
        seed: int | None = None,
        step: int = 0,
    ) -> Tensor:
        """The hidden states of all tokens, (T, D)."""
        return self._encode(batch, types, self.layout(batch, seed, step))

    def _encode(self, batch: PackedBatch, types: Tensor | None, layout: Layout) -> Tensor:
        config = self.config
        if types is None and self.types is not None:
            types = torch.zeros_like(batch.tokens)
        x = ops.embedding(
            batch.tokens,
            self.tokens.weight,
            positions=batch.positions + config.position_offset,
            position_weight=self.positions.weight,
            types=types,
            type_weight=None if self.types is None else self.types.weight,
            norm_weight=self.norm.weight,
            norm_bias=self.norm.bias,
            eps=config.norm_eps,
            padding_idx=config.pad_id,
            dropout=layout.dropout(config.dropout, 0),
        )
        return self.blocks(State(x, x), layout).x

    def forward(
        self,
        batch: PackedBatch,
        types: Tensor | None = None,
        *,
        seed: int | None = None,
        step: int = 0,
    ) -> Loss:
        """The loss at the batch's targets. types: (T,) ids of segments, 0 without them."""
        head = self.config.head
        if head == "none":
            raise ValueError("Bert: without a head there is no loss; use encode")
        layout = self.layout(batch, seed, step)
        x = self._encode(batch, types, layout)
        rows = batch.target_rows
        if head == "mlm":
            return self._mlm_loss(x, rows, batch)
        if head == "token":
            return self._label_loss(x, rows, batch, layout)
        is_first = batch.starts[rows]
        if head == "pretraining":
            losses = (
                self._mlm_loss(x, rows[~is_first], batch),
                self._label_loss(x, rows[is_first], batch, layout),
            )
            return Loss(*map(torch.stack, zip(*losses, strict=True)))
        require_targets_at("Bert", "first token of a sequence", rows, is_first)
        return self._label_loss(x, rows, batch, layout)

    def _mlm_loss(self, x: Tensor, rows: Tensor, batch: PackedBatch) -> Loss:
        features = self.mlm(x[rows])
        return head_loss(features, self.tokens.weight, batch.targets[rows], self.mlm.bias)

    def _label_loss(self, x: Tensor, rows: Tensor, batch: PackedBatch, layout: Layout) -> Loss:
        features = self._label_features(x[rows], layout.at(rows))
        classifier = self.classifier
        return head_loss(features, classifier.weight, batch.targets[rows], classifier.bias)

    def predict(
        self, batch: PackedBatch, types: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits without dropout: (T, V) of mlm, (T, labels) of token, (B, labels) of sequence, the
        first and the last of pretraining. A sequence without tokens gets those of zeros."""
        layout = Layout.of(batch)
        x = self._encode(batch, types, layout)
        head = self.config.head
        if head == "none":
            raise ValueError("Bert: without a head there are no logits; use encode")
        if head == "mlm":
            return ops.linear(self.mlm(x), self.tokens.weight, self.mlm.bias)
        if head != "token":
            first = pooled(x, batch.cu_seqlens[:-1], batch)
        features = self._label_features(x if head == "token" else first, layout)
        labels = ops.linear(features, self.classifier.weight, self.classifier.bias)
        if head != "pretraining":
            return labels
        return ops.linear(self.mlm(x), self.tokens.weight, self.mlm.bias), labels

    def _label_features(self, x: Tensor, layout: Layout) -> Tensor:
        """What the classifier reads of some rows; `layout` tells whose they are."""
        config, site = self.config, 1 + len(self.blocks) * SITES
        p = config.head_dropout or 0.0
        if config.head == "token":
            return ops.dropout(x, layout.dropout(p, site))
        if config.head == "sequence" and config.has_pooler_dropout:
            x = ops.dropout(x, layout.dropout(p, site + 1))
        x = ops.linear(x, self.pooler.weight, self.pooler.bias).tanh()
        return x if config.head == "pretraining" else ops.dropout(x, layout.dropout(p, site))


class MlmHead(nn.Module):
    """Linear, GELU, norm; the decoder behind it is the table of tokens and a bias."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.activation = config.mlm_activation or config.activation

    def forward(self, x: Tensor) -> Tensor:
        x = activate(ops.linear(x, self.transform.weight, self.transform.bias), self.activation)
        return self.norm(x)
