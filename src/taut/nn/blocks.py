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

import torch
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


class Norm(nn.Module):
    """LayerNorm behind a branch, whose bias and dropout, and the stream, come in with its pass."""

    def __init__(self, width: int, eps: float, *, is_pre_norm: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps, self.is_pre_norm = eps, is_pre_norm

    def forward(
        self,
        branch: Tensor,
        stream: Tensor | None = None,
        branch_bias: Tensor | None = None,
        dropout: ops.Dropout | None = None,
    ) -> State:
        affine = self.weight, self.bias
        return add_norm(branch, stream, branch_bias, *affine, self.eps, dropout, self.is_pre_norm)


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


def self_attention(
    state: State,
    layout: Layout,
    qkv_weight: Tensor,  # (3 D, D)
    qkv_bias: Tensor | None,
    out_weight: Tensor,  # (D, D)
    *,
    num_heads: int,
    causal: bool,
    dropout: ops.Dropout | None,
) -> Tensor:
    """Attention between the two linears of its branch, without the bias of the second."""
    qkv = ops.linear(state.x, qkv_weight, qkv_bias, normed=state.normed)
    q, k, v = qkv.view(len(qkv), 3, num_heads, -1).unbind(1)
    y = ops.attention(q, k, v, layout.cu_seqlens, causal=causal, dropout=dropout)
    return ops.linear(y.flatten(1), out_weight)


class SelfAttention(nn.Module):
    """Projections of q, k and v in one GEMM, attention, projection of its output."""

    def __init__(self, width: int, num_heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.num_heads, self.causal, self.dropout = num_heads, causal, dropout

    def forward(self, state: State, layout: Layout, site: int) -> Tensor:
        return self_attention(
            state,
            layout,
            self.qkv.weight,
            self.qkv.bias,
            self.out.weight,
            num_heads=self.num_heads,
            causal=self.causal,
            dropout=layout.dropout(self.dropout, site, keys=layout),
        )


class CrossAttention(nn.Module):
    """Attention to keys and values of other sequences, which are made for all layers at once."""

    def __init__(self, width: int, num_heads: int, *, dropout: float) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.num_heads, self.dropout = num_heads, dropout

    def forward(self, state: State, layout: Layout, memory: Memory, site: int) -> Tensor:
        q = ops.linear(state.x, self.q.weight, self.q.bias, normed=state.normed)
        y = ops.attention(
            q.view(len(q), self.num_heads, -1),
            memory.k,
            memory.v,
            layout.cu_seqlens,
            memory.layout.cu_seqlens,
            dropout=layout.dropout(self.dropout, site, keys=memory.layout),
        )
        return ops.linear(y.flatten(1), self.out.weight)


class Mlp(nn.Module):
    """Linear, activation, dropout, linear; the bias of the second is left to the norm behind."""

    def __init__(self, width: int, inner: int, *, activation: str, dropout: float) -> None:
        super().__init__()
        _, is_gated = ACTIVATIONS[activation]
        self.up = nn.Linear(width, 2 * inner if is_gated else inner)
        self.down = nn.Linear(inner, width)
        self.activation, self.dropout = activation, dropout

    def forward(self, state: State, layout: Layout, site: int) -> Tensor:
        return ops.mlp(
            state.x,
            self.up.weight,
            self.up.bias,
            self.down.weight,
            None,
            activation=self.activation,
            dropout=layout.dropout(self.dropout, site),
            normed=state.normed,
        )


class Block(nn.Module):
    """Attention, norm, mlp, norm; with `crosses`, attention to other sequences before the mlp.

    The biases that close a branch are added by the norm behind it. The dropouts of a block are the
    sites from `first_site` on, SITES of them.
    """

    SITES = 6

    def __init__(
        self,
        width: int,
        num_heads: int,
        inner: int,
        *,
        is_pre_norm: bool,
        causal: bool = False,
        crosses: bool = False,
        activation: str = "gelu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        eps: float = 1e-5,
        first_site: int = 0,
    ) -> None:
        super().__init__()
        self.attention = SelfAttention(width, num_heads, causal=causal, dropout=attention_dropout)
        self.attention_norm = Norm(width, eps, is_pre_norm=is_pre_norm)
        if crosses:
            self.cross = CrossAttention(width, num_heads, dropout=attention_dropout)
            self.cross_norm = Norm(width, eps, is_pre_norm=is_pre_norm)
        self.mlp = Mlp(width, inner, activation=activation, dropout=activation_dropout)
        self.mlp_norm = Norm(width, eps, is_pre_norm=is_pre_norm)
        self.dropout, self.first_site = dropout, first_site

    def forward(self, state: State, layout: Layout, memory: Memory | None = None) -> State:
        site = self.first_site
        y = self.attention(state, layout, site)
        dropout = layout.dropout(self.dropout, site + 1)
        state = self.attention_norm(y, state.stream, self.attention.out.bias, dropout)
        if memory is not None:
            y = self.cross(state, layout, memory, site + 2)
            dropout = layout.dropout(self.dropout, site + 3)
            state = self.cross_norm(y, state.stream, self.cross.out.bias, dropout)
        y = self.mlp(state, layout, site + 4)
        dropout = layout.dropout(self.dropout, site + 5)
        return self.mlp_norm(y, state.stream, self.mlp.down.bias, dropout)

    def flops(self, length: float, keys: float = 0) -> float:
        """FLOPs a token of a training step's products, three times those of the forward pass.

        keys: the length of what is crossed to. What makes its keys and values is not counted.
        """
        products = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        seen = length / 2 if self.attention.causal else length
        return 6 * (products + 2 * self.attention.out.in_features * (seen + keys))


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
