"""The encoder-decoder Transformer, pre- or post-norm, for pairs of packed batches.

    source:  [norm](scale * token + position), dropout;  blocks
    target:  the same;  blocks that cross to the source;  head tied to the table of target tokens

Keys and values of the source are made by one GEMM for all layers of the decoder, and so is their
gradient. A target row's input is the token before, as `target_batch` lays it out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from taut import ops
from taut.nn.blocks import SITES, Layout, Memory, State, affine, first_norm
from taut.packed import PackedBatch

from .base import BlockConfig, Model, head_loss
from .loss import Loss


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(BlockConfig):
    """Transformer-base of "Attention is all you need", or what `named` gives."""

    vocab_size: int = 32000
    source_vocab_size: int = 0  # 0: source and target share one table
    hidden_size: int = 512
    num_layers: int = 6
    num_decoder_layers: int = 0  # 0: as num_layers
    num_heads: int = 8
    max_positions: int = 1024  # rows of the table of positions
    positions: str = "sinusoidal"  # learned, sinusoidal, sinusoidal_halves: sines, then cosines
    position_offset: int = 0  # the row of position 0
    is_pre_norm: bool = False
    scales_embedding: bool = True  # by sqrt(hidden_size)
    has_embedding_norm: bool = False
    has_head_bias: bool = False  # a constant added to the logits
    activation: str = "relu"
    label_smoothing: float = 0.1
    smoothing: str = "fairseq"  # whose form of it: torch, fairseq
    start_id: int = 2  # the first token that the decoder reads
    end_id: int = 2
    pad_id: int = 1  # a row of the table that is never trained
    init_std: float = 0.0  # 0: Xavier for matrices, hidden_size^-0.5 for tables

    POSITIONS: ClassVar = ("learned", "sinusoidal", "sinusoidal_halves")
    NAMED: ClassVar[dict[str, dict[str, Any]]] = {
        "transformer-base": {},
        "transformer-big": {"hidden_size": 1024, "num_heads": 16, "dropout": 0.3},
        "bart-base": {
            "vocab_size": 50265,
            "hidden_size": 768,
            "num_heads": 12,
            "max_positions": 1026,
            "positions": "learned",
            "position_offset": 2,
            "scales_embedding": False,
            "has_embedding_norm": True,
            "has_head_bias": True,
            "activation": "gelu",
            "label_smoothing": 0.0,
            "init_std": 0.02,
        },
    }
    NAMED["bart-large"] = NAMED["bart-base"] | {
        "hidden_size": 1024,
        "num_heads": 16,
        "num_layers": 12,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("positions", self.POSITIONS)
        self.require("smoothing", ("torch", "fairseq"))
        if not self.num_decoder_layers:
            object.__setattr__(self, "num_decoder_layers", self.num_layers)
        if self.positions != "learned" and self.hidden_size % 2:
            raise ValueError(
                f"TransformerConfig: sinusoids need an even hidden_size; got {self.hidden_size}"
            )


class Embedder(nn.Module):
    """Tokens and positions of one side; the table of tokens may be that of the other side."""

    def __init__(self, config: TransformerConfig, tokens: nn.Embedding) -> None:
        super().__init__()
        self.config, self.tokens = config, tokens
        self.sinusoids: Tensor
        width = config.hidden_size
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_positions, width)
        elif config.positions == "sinusoidal_halves":
            self.register_buffer("sinusoids", sinusoids(config.max_positions, width), False)
        if config.has_embedding_norm:
            self.norm = nn.LayerNorm(width, config.norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor, dropout: ops.Dropout | None) -> Tensor:
        config, weight = self.config, self.tokens.weight
        table = None
        if config.positions == "learned":
            table = self.positions.weight
        elif config.positions == "sinusoidal_halves":
            table = self.sinusoids.to(weight.dtype)
        return ops.embedding(
            tokens,
            weight,
            scale=math.sqrt(config.hidden_size) if config.scales_embedding else 1.0,
            positions=positions + config.position_offset,
            position_weight=table,
            sinusoidal=config.max_positions if table is None else None,
            norm_weight=self.norm.weight if config.has_embedding_norm else None,
            norm_bias=self.norm.bias if config.has_embedding_norm else None,
            eps=config.norm_eps,
            padding_idx=config.pad_id,
            dropout=dropout,
        )


def sinusoids(rows: int, width: int) -> Tensor:
    """The table of positions with sines in the first half of the columns, cosines in the other."""
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


class Transformer(Model):
    """model(source, target) is the Loss at the target's targets."""

    config: TransformerConfig
    head_bias: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, layers, is_pre_norm = (
            config.hidden_size,
            config.num_decoder_layers,
            config.is_pre_norm,
        )
        tokens = nn.Embedding(config.vocab_size, width)
        self.target_embedder = Embedder(config, tokens)
        if config.source_vocab_size:
            tokens = nn.Embedding(config.source_vocab_size, width)
        self.source_embedder = Embedder(config, tokens)
        sites = 2 + SITES * config.num_layers
        self.encoder = config.blocks(2, is_pre_norm=is_pre_norm)
        self.decoder = config.blocks(
            sites, num_layers=layers, is_pre_norm=is_pre_norm, causal=True, crosses=True
        )
        if is_pre_norm:
            self.encoder_norm = nn.LayerNorm(width, config.norm_eps)
            self.decoder_norm = nn.LayerNorm(width, config.norm_eps)
        self.cross_kv = nn.Linear(width, 2 * layers * width)  # k and v of a layer after another
        if config.has_head_bias:
            self.register_buffer("head_bias", torch.zeros(config.vocab_size))
        self.init_weights()

    def init_weights(self, seed: int | None = None) -> "Transformer":
        super().init_weights(seed)
        for embedder in (self.source_embedder, self.target_embedder):
            nn.init.zeros_(embedder.tokens.weight[self.config.pad_id].detach())
        return self

    def init_matrix(self, weight: Tensor, generator: torch.Generator | None) -> None:
        width = self.config.hidden_size
        if self.config.init_std:
            super().init_matrix(weight, generator)
        elif weight.shape[1] == width and any(
            weight is module.weight for module in self.modules() if isinstance(module, nn.Embedding)
        ):
            nn.init.normal_(weight, std=width**-0.5, generator=generator)
        else:  # each of the matrices that are fused into one, as if it stood alone
            parts = weight.shape[0] // width if weight.shape[0] % width == 0 else 1
            is_fused = weight is self.cross_kv.weight or weight.shape[0] == 3 * width
            for part in weight.chunk(parts if is_fused else 1):
                nn.init.xavier_uniform_(part, generator=generator)

    def flops_per_token(self, length: float, targets: float = 1.0) -> float:
        """FLOPs of a pair of two sequences of `length`, for each of the target's tokens."""
        blocks = self.encoder.flops(length) + self.decoder.flops(length, keys=length)
        head = self.target_embedder.tokens.weight.numel()
        return blocks + 6 * (self.cross_kv.weight.numel() + head * targets)

    def encode(self, source: PackedBatch, *, seed: int | None = None, step: int = 0) -> Tensor:
        """The hidden states of the source, (T, D)."""
        return self._encode(source, self.layout(source, seed, step)).x

    def _encode(self, source: PackedBatch, layout: Layout) -> State:
        dropout = layout.dropout(self.config.dropout, 0)
        x = self.source_embedder(source.tokens, source.positions, dropout)
        return self.encoder(self.first(x, "encoder_norm"), layout)

    def memories(self, source: PackedBatch, layout: Layout) -> list[Memory]:
        """What each layer of the decoder crosses to."""
        memory = self._encode(source, layout)
        kv = ops.linear(memory.x, self.cross_kv.weight, self.cross_kv.bias, normed=memory.normed)
        kv = kv.view(len(kv), 2 * len(self.decoder), self.config.num_heads, -1)
        parts = kv.unbind(1)
        return [Memory(k, v, layout) for k, v in zip(parts[::2], parts[1::2], strict=True)]

    def _decode(self, target: PackedBatch, layout: Layout, memories: list[Memory]) -> Tensor:
        dropout = layout.dropout(self.config.dropout, 1)
        x = self.target_embedder(target.tokens, target.positions, dropout)
        return self.decoder(self.first(x, "decoder_norm"), layout, memories).x

    def first(self, x: Tensor, norm: str) -> State:
        """The state in front of a stack; `norm` is the norm there of a pre-norm one."""
        if not self.config.is_pre_norm:
            return State(x, x)
        return first_norm(x, *affine(getattr(self, norm)), self.config.norm_eps)

    def decode(
        self, source: PackedBatch, target: PackedBatch, *, seed: int | None = None, step: int = 0
    ) -> Tensor:
        """The hidden states of the target, (T, D)."""
        if source.num_sequences != target.num_sequences:
            raise ValueError(
                "Transformer: source and target must hold as many sequences; got "
                f"{source.num_sequences} and {target.num_sequences}: one may be empty"
            )
        layout = self.layout(source, seed, step)
        memories = self.memories(source, layout)
        return self._decode(target, Layout.of(target, layout.seed, step), memories)

    def forward(
        self, source: PackedBatch, target: PackedBatch, *, seed: int | None = None, step: int = 0
    ) -> Loss:
        """The loss at the target's targets."""
        x = self.decode(source, target, seed=seed, step=step)
        rows = target.target_rows
        return head_loss(
            x[rows],
            self.target_embedder.tokens.weight,
            target.targets[rows],
            self._bias(x),
            label_smoothing=self.config.label_smoothing,
            smoothing=self.config.smoothing,
        )

    def predict(self, source: PackedBatch, target: PackedBatch) -> Tensor:
        """Logits without dropout, (T, V)."""
        memories = self.memories(source, Layout.of(source))
        return self.logits(self._decode(target, Layout.of(target), memories))

    def logits(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.target_embedder.tokens.weight, self._bias(x))

    def _bias(self, x: Tensor) -> Tensor | None:
        return self.head_bias.to(x.dtype) if self.config.has_head_bias else None

    def target_batch(
        self,
        sequences: Sequence[Tensor | Sequence[int]],
        sample_ids: Tensor | Sequence[int] | None = None,
    ) -> PackedBatch:
        """Sequences without special tokens as the decoder reads them: behind start_id, with targets
        that end with end_id."""
        rows = [torch.as_tensor(row, dtype=torch.int64) for row in sequences]
        start, end = (torch.tensor([x]) for x in (self.config.start_id, self.config.end_id))
        return PackedBatch.from_sequences(
            [torch.cat([start, row]) for row in rows],
            [torch.cat([row, end]) for row in rows],
            sample_ids,
        )
