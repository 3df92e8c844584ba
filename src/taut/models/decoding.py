"""Greedy and beam search with an encoder-decoder Transformer, a token a step, for evaluation.

A step computes the new tokens alone: the keys and values of those before are kept for each layer,
(hypotheses, steps, H, E), and those of the source are kept once, however many hypotheses read them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from taut import ops
from taut.nn.blocks import Affine, Block, Layout, Memory, State, add_norm
from taut.packed import PackedBatch

from .transformer import Transformer


@dataclass
class _Past:
    """Keys and values of a layer so far."""

    k: Tensor | None = None
    v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Of all steps, packed: (hypotheses * steps, H, E)."""
        self.k = k[:, None] if self.k is None else torch.cat([self.k, k[:, None]], 1)
        self.v = v[:, None] if self.v is None else torch.cat([self.v, v[:, None]], 1)
        return self.k.flatten(0, 1), self.v.flatten(0, 1)

    def take(self, rows: Tensor) -> None:
        assert self.k is not None
        assert self.v is not None
        self.k, self.v = self.k[rows], self.v[rows]


class Search:
    """The decoder over as many hypotheses a source sequence, of which all are of one length."""

    def __init__(self, model: Transformer, source: PackedBatch, beams: int) -> None:
        self.model, self.beams = model, beams
        self.memories = model.memories(source, Layout.of(source))
        self.past = [_Past() for _ in self.memories]
        self.steps = 0
        count = source.num_sequences
        device = source.tokens.device
        # the hypotheses of a sequence are, where they cross, queries of one sequence
        self.crossing = torch.arange(count + 1, dtype=torch.int32, device=device) * beams
        self.single = torch.arange(count * beams + 1, dtype=torch.int32, device=device)

    def step(self, tokens: Tensor) -> Tensor:
        """Log-probabilities (hypotheses, V) of what follows these tokens, one a hypothesis."""
        model = self.model
        positions = torch.full_like(tokens, self.steps)
        self.steps += 1
        x = model.target_embedder(tokens, positions, None)
        state = model.first(x, "decoder_norm")
        for block, past, memory in zip(model.decoder, self.past, self.memories, strict=True):
            state = self._block(block, state, past, memory)
        return model.logits(state.x).float().log_softmax(-1)

    def _block(self, block: Block, state: State, past: _Past, memory: Memory) -> State:
        """run_block for one token a hypothesis."""
        weights, options = block.weights(), block.options
        assert weights.cross is not None
        cross_q, cross_out, cross_norm = weights.cross

        def close(y: Tensor, bias: Tensor | None, norm: Affine) -> State:
            is_pre_norm = options.is_pre_norm
            return add_norm(y, state.stream, bias, *norm, options.eps, None, is_pre_norm)

        qkv = ops.linear(state.x, *weights.qkv)
        q, k, v = qkv.view(len(qkv), 3, options.num_heads, -1).unbind(1)
        y = ops.attention(q, *past.append(k, v), self.single, self.single * self.steps)
        y = ops.linear(y.flatten(1), weights.out[0])
        state = close(y, weights.out[1], weights.attention_norm)
        q = ops.linear(state.x, *cross_q).view(q.shape)
        y = ops.attention(q, memory.k, memory.v, self.crossing, memory.layout.cu_seqlens)
        y = ops.linear(y.flatten(1), cross_out[0])
        state = close(y, cross_out[1], cross_norm)
        activation = options.activation
        y = ops.mlp(state.x, *weights.up, weights.down[0], None, activation=activation)
        return close(y, weights.down[1], weights.mlp_norm)

    def take(self, rows: Tensor) -> None:
        """Go on with these hypotheses in the place of those that there are."""
        for past in self.past:
            past.take(rows)


@torch.no_grad()
def generate(
    model: Transformer,
    source: PackedBatch,
    *,
    beams: int = 1,
    max_tokens: int = 200,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """The best hypothesis of each source sequence, without start_id and end_id.

    Of `beams` hypotheses a step keeps the best; with one that is greedy search. They are compared
    by log-probability / tokens^length_penalty. A source sequence ends when as many hypotheses have
    ended as there are beams, or at max_tokens.
    """
    if beams < 1 or max_tokens < 1:
        raise ValueError(
            f"generate: beams and max_tokens must be at least 1; got {beams} and {max_tokens}"
        )
    config, count, device = model.config, source.num_sequences, source.tokens.device
    search = Search(model, source, beams)
    scores = torch.full((count, beams), -torch.inf, device=device)
    scores[:, 0] = 0  # all beams are one at the start
    texts: list[list[list[int]]] = [[[] for _ in range(beams)] for _ in range(count)]
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in range(count)]
    tokens = torch.full((count * beams,), config.start_id, device=device)
    for length in range(1, max_tokens + 1):
        follows = scores[:, :, None] + search.step(tokens).view(count, beams, -1)
        # as many that go on as there are beams are among the best 2 * beams, since one token ends
        width = min(2 * beams, follows.shape[1] * follows.shape[2])
        best, index = follows.flatten(1).topk(width, dim=1)
        parents, words = index // follows.shape[2], index % follows.shape[2]
        rows, next_texts = [], []
        for i in range(count):
            going = []
            candidates = zip(best[i].tolist(), parents[i].tolist(), words[i].tolist(), strict=True)
            for rank, (score, parent, word) in enumerate(candidates):
                if word != config.end_id:
                    going.append((score, parent, word))
                elif rank < beams and score > -math.inf:
                    ended[i].append((score / length**length_penalty, texts[i][parent]))
            rows.append(going[:beams] + [(-math.inf, 0, config.end_id)] * (beams - len(going)))
            next_texts.append([[*texts[i][parent], word] for _, parent, word in rows[-1]])
        texts = next_texts
        if all(len(done) >= beams for done in ended):
            break
        scores = torch.tensor([[score for score, _, _ in row] for row in rows], device=device)
        tokens = torch.tensor([word for row in rows for _, _, word in row], device=device)
        taken = [i * beams + parent for i, row in enumerate(rows) for _, parent, _ in row]
        search.take(torch.tensor(taken, device=device))
    for i in range(count):
        if len(ended[i]) < beams:  # cut at max_tokens
            going_on = zip(scores[i].tolist(), texts[i], strict=True)
            ended[i] += [(score / length**length_penalty, text) for score, text in going_on]
    return [max(done, key=lambda entry: entry[0])[1] for done in ended]
