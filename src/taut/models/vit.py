"""ViT: a pre-norm encoder of image patches, which may come from images of different sizes.

    s = dropout(patch projection + position), a class token first;  blocks;  norm;  head

A batch holds a row of pixels for each patch. With pooling "class" the first row of an image stands
for the class token and its pixels are not read. The target of an image stands at its first row.
`pack` makes such a batch from images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from taut import ops
from taut.nn.blocks import Layout, affine, first_norm
from taut.packed import PackedBatch

from .base import BlockConfig, Model, head_loss, pooled, require_targets_at
from .loss import Loss


@dataclass(frozen=True, kw_only=True)
class VitConfig(BlockConfig):
    """ViT-B/16 at 224 x 224, or what `named` gives."""

    image_size: int = 224  # of the largest image, whose patches have positions of their own
    patch_size: int = 16
    num_channels: int = 3
    pooling: str = "class"  # class, mean
    head: str = "sequence"  # none, sequence
    num_labels: int = 1000
    has_pooler: bool = False  # a pooler that is kept for its weights
    dropout: float = 0.0
    norm_eps: float = 1e-12

    HEADS: ClassVar = ("none", "sequence")
    POOLINGS: ClassVar = ("class", "mean")
    NAMED: ClassVar[dict[str, dict[str, Any]]] = {
        "vit-b16": {},
        "vit-b32": {"patch_size": 32},
        "vit-s16": {"hidden_size": 384, "num_heads": 6},
        "vit-ti16": {"hidden_size": 192, "num_heads": 3},
        "vit-l16": {"hidden_size": 1024, "num_layers": 24, "num_heads": 16},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("head", self.HEADS)
        self.require("pooling", self.POOLINGS)
        if self.image_size % self.patch_size:
            raise ValueError(
                "VitConfig: image_size must be a multiple of patch_size; got "
                f"{self.image_size} and {self.patch_size}"
            )

    @property
    def grid(self) -> int:
        """Patches along a side of the largest image."""
        return self.image_size // self.patch_size

    @property
    def has_class_token(self) -> bool:
        return self.pooling == "class"


class Vit(Model):
    """model(batch) is the Loss of its head, model.encode(batch) the hidden states (T, D)."""

    config: VitConfig

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patches = nn.Linear(config.num_channels * config.patch_size**2, width)
        if config.has_class_token:
            self.class_token = nn.Parameter(torch.zeros(width))
        self.positions = nn.Embedding(config.grid**2 + config.has_class_token, width)
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.blocks = config.blocks(1, is_pre_norm=True)
        if config.has_pooler:
            self.pooler = nn.Linear(width, width)
        if config.head == "sequence":
            self.classifier = nn.Linear(width, config.num_labels)
        self.init_weights()

    def init_weights(self, seed: int | None = None) -> "Vit":
        super().init_weights(seed)
        if self.config.has_class_token:
            generator = None if seed is None else torch.Generator().manual_seed(seed + 1)
            self.init_matrix(self.class_token, generator)
        return self

    def flops_per_token(self, length: float, targets: float = 1.0) -> float:
        blocks = self.blocks.flops(length)
        return blocks + 4 * self.patches.weight.numel()  # pixels need no gradient

    def encode(self, batch: PackedBatch, *, seed: int | None = None, step: int = 0) -> Tensor:
        """The hidden states of all rows behind the last norm, (T, D)."""
        return self._encode(batch, self.layout(batch, seed, step))

    def _encode(self, batch: PackedBatch, layout: Layout) -> Tensor:
        if not batch.tokens.is_floating_point():
            raise ValueError(
                f"Vit: a batch holds pixels, floating; got {batch.tokens.dtype}: use Vit.pack"
            )
        weight = self.patches.weight
        x = ops.linear(batch.tokens.to(weight.dtype), weight, self.patches.bias)
        if self.config.has_class_token:
            x = torch.where(batch.starts[:, None], self.class_token, x)
        x = x + ops.embedding(batch.positions, self.positions.weight)
        x = ops.dropout(x, layout.dropout(self.config.dropout, 0))
        state = first_norm(x, *affine(self.norm), self.config.norm_eps)
        return self.blocks(state, layout).x

    def forward(self, batch: PackedBatch, *, seed: int | None = None, step: int = 0) -> Loss:
        """The loss at the batch's targets, which stand at the first row of an image."""
        if self.config.head == "none":
            raise ValueError("Vit: without a head there is no loss; use encode")
        x = self.encode(batch, seed=seed, step=step)
        rows = batch.target_rows
        require_targets_at("Vit", "first row of an image", rows, batch.starts[rows])
        if self.config.has_class_token:
            pooled = x[rows]
        else:
            pooled = self._mean(x, batch)[
                torch.searchsorted(batch.cu_seqlens[1:], rows, right=True)
            ]
        classifier = self.classifier
        return head_loss(pooled, classifier.weight, batch.targets[rows], classifier.bias)

    def predict(self, batch: PackedBatch) -> Tensor:
        """Logits without dropout, (B, labels)."""
        if self.config.head == "none":
            raise ValueError("Vit: without a head there are no logits; use encode")
        x = self._encode(batch, Layout.of(batch))
        if self.config.has_class_token:
            features = pooled(x, batch.cu_seqlens[:-1], batch)
        else:
            features = self._mean(x, batch)
        return ops.linear(features, self.classifier.weight, self.classifier.bias)

    @staticmethod
    def _mean(x: Tensor, batch: PackedBatch) -> Tensor:
        """The mean of the rows of each image, summed in fp32."""
        sums = torch.segment_reduce(x.float(), "sum", offsets=batch.cu_seqlens.long(), axis=0)
        return (sums / batch.lengths.clamp(min=1)[:, None]).to(x.dtype)

    def pack(
        self,
        images: Sequence[Tensor],
        targets: Sequence[int] | None = None,
        sample_ids: Tensor | Sequence[int] | None = None,
    ) -> PackedBatch:
        """A batch from images (C, height, width), sides multiples of the patch size, up to
        image_size. A patch has the position of its row and column in the largest image."""
        config = self.config
        side, most = config.patch_size, config.image_size
        rows, positions = [], []
        for i, image in enumerate(images):
            height, width = image.shape[-2:]
            is_shaped = image.dim() == 3 and len(image) == config.num_channels
            if not is_shaped or height % side or width % side or max(height, width) > most:
                raise ValueError(
                    f"Vit.pack: images must be ({config.num_channels}, height, width), sides "
                    f"multiples of {side} up to {most}; image {i} is {tuple(image.shape)}: "
                    "resize it"
                )
            patches = image.unfold(1, side, side).unfold(2, side, side)  # (C, h, w, side, side)
            down, across = torch.arange(height // side), torch.arange(width // side)
            place = (down[:, None] * config.grid + across).flatten() + config.has_class_token
            flat = patches.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
            if config.has_class_token:
                flat = torch.cat([flat.new_zeros(1, flat.shape[1]), flat])
                place = torch.cat([place.new_zeros(1), place])
            rows.append(flat)
            positions.append(place)
        batch = PackedBatch.from_sequences(rows, sample_ids=sample_ids)
        placed = torch.cat(positions).to(batch.tokens.device)
        labels = batch.targets.clone()
        if targets is not None:
            if len(targets) != len(rows):
                raise ValueError(
                    f"Vit.pack: {len(rows)} images need as many targets; got {len(targets)}"
                )
            first = [0, *accumulate(map(len, rows))][:-1]
            labels[first] = torch.as_tensor(targets, device=labels.device)
        return PackedBatch(
            batch.tokens, batch.cu_seqlens, batch.max_seqlen, placed, batch.sample_ids, labels
        )
