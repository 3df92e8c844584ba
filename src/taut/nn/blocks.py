"""Transformer blocks on packed tokens: parameters plus calls to ops.

    post-norm     x = norm(x + dropout(branch(x)))                  the stream is x
    pre-norm      s = s + dropout(branch(x));  x = norm(s)          the stream is the sum s

Both are a branch and then a norm: in pre-norm the one that others count to the next branch. So one
block serves both: attention, norm, mlp, norm. A pre-norm stack needs one norm more in front of it,
and its last norm is the final one.

Kept for the backward pass, in bytes a token of 16-bit numbers (h width, a heads): x-hat of the two
norms 4h, q, k, v 6h, attention's output 2h and log-sum-exp 4a, the mlp's pre-activation 8h, two
standard deviations 8. No norm's output is kept: linears that read one keep its x-hat, which is
there anyway.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from taut import ops
from taut.ops.linear import Normed
from taut.ops.mlp import ACTIVATIONS
from taut.packed import PackedBatch


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a packed batch stand, which is all that a block needs to know of it."""

    cu_seqlens: Tensor
    sample_ids: Tensor  # (T,)
    positions: Tensor  # (T,)
    seed: int | None = None  # None: no dropout
    step: int = 0

    @classmethod
    def of(cls, batch: PackedBatch, seed: int | None = None, step: int = 0) -> "Layout":
        return cls(batch.cu_seqlens, batch.token_sample_ids, batch.positions, seed, step)

    def at(self, rows: Tensor) -> "Layout":
        """The layout of some of the rows, for ops that look at rows one by one."""
        return replace(self, sample_ids=self.sample_ids[rows], positions=self.positions[rows])

    def dropout(self, p: float, site: int, keys: "Layout | None" = None) -> ops.Dropout | None:
        """The dropout of a site; for an attention with `keys`, the layout of what it looks at."""
        if self.seed is None or p == 0:
            return None
        key_positions = None if keys is None else keys.positions
        return ops.Dropout(
            p, self.seed, self.step, site, self.sample_ids, self.positions, key_positions
        )


class State(NamedTuple):
    """What goes from one branch to the next."""

    x: Tensor  # what a branch reads
    stream: Tensor  # what its output is added to
    normed: Normed | None = None  # x-hat, weight and bias of the norm that made x


class Memory(NamedTuple):
    """What a decoder's block crosses to."""

    k: Tensor  # (T, H, E)
    v: Tensor
    layout: Layout


Affine = tuple[Tensor, Tensor | None]  # weight and bias


class Weights(NamedTuple):
    """The tensors of a block, whoever holds them."""

    qkv: Affine  # (3 D, D)
    out: Affine
    attention_norm: Affine
    up: Affine
    down: Affine
    mlp_norm: Affine
    cross: tuple[Affine, Affine, Affine] | None = None  # q, out, norm


@dataclass(frozen=True)
class Options:
    """The numbers of a block. Its dropouts are the sites from first_site on, SITES of them."""

    num_heads: int
    is_pre_norm: bool
    activation: str = "gelu"
    causal: bool = False
    dropout: float = 0.0  # of what a branch adds to the stream
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    eps: float = 1e-5
    first_site: int = 0


SITES = 6


def run_block(
    weights: Weights, options: Options, state: State, layout: Layout, memory: Memory | None = None
) -> State:
    """Attention, norm, mlp, norm; with a memory, attention to it and a norm before the mlp.

    The bias that closes a branch is added by the norm behind it.
    """
    site, heads = options.first_site, options.num_heads

    def close(y: Tensor, bias: Tensor | None, norm: Affine, site: int) -> State:
        dropout = layout.dropout(options.dropout, site)
        is_pre_norm = options.is_pre_norm
        return add_norm(y, state.stream, bias, *norm, options.eps, dropout, is_pre_norm)

    qkv = ops.linear(state.x, *weights.qkv, normed=state.normed)
    q, k, v = qkv.view(len(qkv), 3, heads, -1).unbind(1)
    dropout = layout.dropout(options.attention_dropout, site, keys=layout)
    y = ops.attention(q, k, v, layout.cu_seqlens, causal=options.causal, dropout=dropout)
    y = ops.linear(y.flatten(1), weights.out[0])
    state = close(y, weights.out[1], weights.attention_norm, site + 1)
    if memory is not None:
        assert weights.cross is not None
        cross_q, cross_out, cross_norm = weights.cross
        q = ops.linear(state.x, *cross_q, normed=state.normed)
        y = ops.attention(
            q.view(len(q), heads, -1),
            memory.k,
            memory.v,
            layout.cu_seqlens,
            memory.layout.cu_seqlens,
            dropout=layout.dropout(options.attention_dropout, site + 2, keys=memory.layout),
        )
        y = ops.linear(y.flatten(1), cross_out[0])
        state = close(y, cross_out[1], cross_norm, site + 3)
    y = ops.mlp(
        state.x,
        *weights.up,
        weights.down[0],
        None,
        activation=options.activation,
        dropout=layout.dropout(options.activation_dropout, site + 4),
        normed=state.normed,
    )
    return close(y, weights.down[1], weights.mlp_norm, site + 5)


def add_norm(
    branch: Tensor,
    stream: Tensor | None,
    branch_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dropout: ops.Dropout | None,
    is_pre_norm: bool,
) -> State:
    """The state behind norm(stream + dropout(branch + branch_bias))."""
    x, *total, xhat = ops.dropout_add_norm(
        branch,
        stream,
        weight,
        bias,
        x_bias=branch_bias,
        eps=eps,
        dropout=dropout,
        return_sum=is_pre_norm,
        return_xhat=True,
    )
    return State(x, total[0] if is_pre_norm else x, (xhat, weight, bias))


def first_norm(stream: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> State:
    """The state in front of a pre-norm stack."""
    state = add_norm(stream, None, None, weight, bias, eps, None, is_pre_norm=False)
    return state._replace(stream=stream)


class SelfAttention(nn.Module):
    """Projections of q, k and v, fused, and of the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)


class CrossAttention(nn.Module):
    """Projections of q and of the output; those of k and v are one for all layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.out = nn.Linear(width, width)


class Mlp(nn.Module):
    """Two linears; a gated activation takes twice the columns of the first."""

    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        _, is_gated = ACTIVATIONS[activation]
        self.up = nn.Linear(width, 2 * inner if is_gated else inner)
        self.down = nn.Linear(inner, width)


class Block(nn.Module):
    """The parameters of run_block."""

    def __init__(self, width: int, inner: int, options: Options, *, crosses: bool = False) -> None:
        super().__init__()
        self.options = options
        self.attention = SelfAttention(width)
        self.attention_norm = nn.LayerNorm(width, options.eps)
        if crosses:
            self.cross = CrossAttention(width)
            self.cross_norm = nn.LayerNorm(width, options.eps)
        self.mlp = Mlp(width, inner, options.activation)
        self.mlp_norm = nn.LayerNorm(width, options.eps)

    def weights(self) -> Weights:
        cross = None
        if hasattr(self, "cross"):
            cross = affine(self.cross.q), affine(self.cross.out), affine(self.cross_norm)
        return Weights(
            affine(self.attention.qkv),
            affine(self.attention.out),
            affine(self.attention_norm),
            affine(self.mlp.up),
            affine(self.mlp.down),
            affine(self.mlp_norm),
            cross,
        )

    def forward(self, state: State, layout: Layout, memory: Memory | None = None) -> State:
        return run_block(self.weights(), self.options, state, layout, memory)

    def flops(self, length: float, keys: float = 0) -> float:
        """FLOPs a token of a training step's products, three times those of the forward pass.

        keys: the length of what is crossed to. What makes its keys and values is not counted.
        """
        products = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        seen = length / 2 if self.options.causal else length
        return 6 * (products + 2 * self.attention.out.in_features * (seen + keys))


def affine(module: nn.Linear | nn.LayerNorm) -> Affine:
    return module.weight, module.bias


class Stack(nn.ModuleList):
    """Blocks, one behind another."""

    def __iter__(self) -> Iterator[Block]:
        return super().__iter__()  # type: ignore[return-value]

    def forward(
        self, state: State, layout: Layout, memories: Sequence[Memory | None] | None = None
    ) -> State:
        for i, block in enumerate(self):
            state = block(state, layout, memories[i] if memories else None)
        return state

    def flops(self, length: float, keys: float = 0) -> float:
        return sum(block.flops(length, keys) for block in self)
