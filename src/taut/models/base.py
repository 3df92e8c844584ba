"""What all models share: the fields of their blocks, counts of parameters and FLOPs, the seed."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from taut import ops
from taut.nn.blocks import SITES, Block, Layout, Options, Stack
from taut.nn.layers import draw_seed
from taut.ops.mlp import ACTIVATIONS
from taut.packed import PackedBatch

from .loss import Loss


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The fields of a stack of blocks, which the config of every model has."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 0  # 0: four times hidden_size
    activation: str = "gelu"
    dropout: float = 0.1  # of embeddings and of the output of each branch
    attention_dropout: float | None = None  # of attention probabilities; None: as dropout
    activation_dropout: float = 0.0  # between the two linears of an mlp
    norm_eps: float = 1e-5
    init_std: float = 0.02

    NAMED: ClassVar[dict[str, dict[str, Any]]] = {}

    def __post_init__(self) -> None:
        if not self.intermediate_size:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        if self.attention_dropout is None:
            object.__setattr__(self, "attention_dropout", self.dropout)
        name = type(self).__name__
        for field in ("hidden_size", "num_layers", "num_heads", "intermediate_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{name}: {field} must be at least 1; got {getattr(self, field)}")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"{name}: hidden_size must be a multiple of num_heads; got {self.hidden_size} and "
                f"{self.num_heads}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"{name}: activation must be one of {', '.join(ACTIVATIONS)}; "
                f"got {self.activation!r}"
            )
        for field in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"{name}: {field} must lie in [0, 1); got {getattr(self, field)}")

    @classmethod
    def named(cls, name: str, **fields: Any) -> Self:
        """A size by its name, with these fields in the place of its own."""
        if name not in cls.NAMED:
            raise ValueError(f"{cls.__name__}: there are {', '.join(cls.NAMED)}; got {name!r}")
        return cls(**cls.NAMED[name] | fields)

    def require(self, field: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a value of a field that is not in the list."""
        if getattr(self, field) not in allowed:
            raise ValueError(
                f"{type(self).__name__}: {field} must be one of "
                f"{', '.join(map(str, allowed))}; got {getattr(self, field)!r}"
            )

    def blocks(
        self,
        first_site: int,
        *,
        is_pre_norm: bool,
        num_layers: int = 0,
        causal: bool = False,
        crosses: bool = False,
    ) -> Stack:
        """A stack of blocks whose dropouts are the sites from first_site on."""
        options = Options(
            self.num_heads,
            is_pre_norm,
            self.activation,
            causal,
            self.dropout,
            self.attention_dropout or 0.0,
            self.activation_dropout,
            self.norm_eps,
        )
        sites = range(first_site, first_site + SITES * (num_layers or self.num_layers), SITES)
        return Stack(
            Block(
                self.hidden_size,
                self.intermediate_size,
                replace(options, first_site=site),
                crosses=crosses,
            )
            for site in sites
        )


class Model(nn.Module):
    """A model on packed batches: model(batch) is its Loss, model.encode(batch) its hidden states.

    In training dropout is drawn by (seed, step) and by the tokens' coordinates; without a seed one
    is drawn from torch's default CPU generator, which torch.manual_seed sets.
    """

    config: Any
    hf_source: Any = None  # of a model that taut.load made: what taut.save writes back

    def layout(self, batch: PackedBatch, seed: int | None, step: int) -> Layout:
        """The layout of a batch, with dropout in training alone."""
        if not self.training:
            seed = None
        elif seed is None:
            seed = draw_seed()
        return Layout.of(batch, seed, step)

    def init_weights(self, seed: int | None = None) -> Self:
        """Draw all weights anew: matrices normal with the config's init_std, biases 0, norms 1."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear | nn.Embedding):
                self.init_matrix(module.weight, generator)
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor):
                nn.init.zeros_(bias)
        return self

    def init_matrix(self, weight: Tensor, generator: torch.Generator | None) -> None:
        nn.init.normal_(weight, std=self.config.init_std, generator=generator)

    def param_count(self) -> int:
        """Parameters; shared ones once."""
        return sum(p.numel() for p in self.parameters())


def pooled(x: Tensor, rows: Tensor, batch: PackedBatch) -> Tensor:
    """A row of x for each sequence; zeros for one without tokens."""
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])  # the row after the last is empty
    return padded[torch.where(batch.lengths > 0, rows.long(), len(x))]


def require_targets_at(name: str, place: str, rows: Tensor, is_right: Tensor) -> None:
    """Refuse a target that no head reads. On a GPU, which would be waited for, nothing is read."""
    if rows.device.type == "cpu" and not is_right.all():
        raise ValueError(
            f"{name}: a target stands at the {place}; got one at row {int(rows[~is_right][0])} of "
            "the batch, inside of a sequence"
        )


def head_loss(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **criterion: Any
) -> Loss:
    """The cross entropy of rows that all carry a target."""
    loss = ops.linear_cross_entropy(x, weight, targets, bias, **criterion)
    assert isinstance(loss, Tensor)
    return Loss(loss, torch.full_like(loss, len(targets)))
