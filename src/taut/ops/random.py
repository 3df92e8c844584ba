"""Dropout decisions as a pure function of logical coordinates; nothing random is ever stored.

The generator is Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
counter-based and in 32-bit integer arithmetic, so that Python, C++ and Triton give the same bits.

    key          first two words of Philox-10 of (seed low, seed high, step, site)
    counter      (column group, position, plane, sample id);  plane 0: features, 1 + h: head h
    decision     keep  <=>  u >= round(p * 2^24) * 2^8,  u of 32 bits      (p exact to 2^-24)

One counter of Philox-7 (the fewest rounds that pass BigCrush) serves eight columns. Tiles have 128
of them; lane i of a tile gives four words, and half h of word w is the upper half of u for column
32 w + 2 i + h: words laid side by side are contiguous vectors, without a shuffle. It decides all
but one time in 2^16. The lower half of u is half h of a hash of word w + 1 (mod 4), a bijection:
given the upper half it is as uniform as that word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

ROUNDS = 7
_KEY_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
TILE = 128


@dataclass(frozen=True, eq=False)
class Dropout:
    """Where a dropout stands, so that the same token always draws the same numbers.

    site numbers the dropouts of a model; sample_ids and positions (one per row, int64) say which
    token a row is. Without them every row belongs to sample 0 and its position is its row number.

    In attention rows are queries. There, without positions and sample ids, a query or key is known
    by its number in its sequence, and a sequence by its number. key_positions (one per key, int64)
    and first_head say what the keys and the heads of this call are where it sees a part of them.
    """

    p: float  # probability of a zero, rounded to a multiple of 2^-24
    seed: int
    step: int = 0
    site: int = 0
    sample_ids: Tensor | None = None  # (T,), 0 <= id < 2^32
    positions: Tensor | None = None  # (T,)
    key_positions: Tensor | None = None  # (Tk,)
    first_head: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.p < 1.0:
            raise ValueError(f"dropout: p must lie in [0, 1); got {self.p}")
        for name, bits in (("seed", 63), ("step", 32), ("site", 32), ("first_head", 30)):
            if not 0 <= getattr(self, name) < 2**bits:
                raise ValueError(
                    f"dropout: {name} must lie in [0, 2^{bits}); got {getattr(self, name)}"
                )

    def _coordinates(self, op: str, name: str, rows: int, device: torch.device) -> Tensor | None:
        """The ids of as many rows as there are, flat."""
        ids = getattr(self, name)
        if ids is None:
            return None
        if ids.numel() != rows or ids.dtype != torch.int64 or ids.device != device:
            raise ValueError(
                f"{op}: dropout.{name} must hold one int64 per row on {device}; got "
                f"{tuple(ids.shape)} {ids.dtype} on {ids.device} for {rows} rows"
            )
        return ids.reshape(-1).contiguous()

    def arguments(self, op: str, rows: int, device: torch.device) -> tuple[Any, ...]:
        ids, positions = (
            self._coordinates(op, name, rows, device) for name in ("sample_ids", "positions")
        )
        return self.p, self.seed, self.step, self.site, ids, positions

    def key_arguments(self, op: str, keys: int, device: torch.device) -> tuple[Any, ...]:
        return self._coordinates(op, "key_positions", keys, device), self.first_head


# What every op with a dropout takes at the end of its schema, and the arguments that fill it.
SCHEMA = "float p, SymInt seed, SymInt step, SymInt site, Tensor? sample_ids, Tensor? positions"
NO_DROPOUT = (0.0, 0, 0, 0, None, None)
# What an attention takes after it.
KEYS_SCHEMA = "Tensor? key_positions, SymInt first_head"


def op_arguments(op: str, dropout: Dropout | None, x: Tensor) -> tuple[Any, ...]:
    """The arguments of SCHEMA, checked against the rows of x, (..., D)."""
    if dropout is None or threshold(dropout.p) == 0:
        return NO_DROPOUT
    if dropout.key_positions is not None or dropout.first_head:
        raise ValueError(f"{op}: dropout.key_positions and first_head are for attention alone")
    return dropout.arguments(op, x.shape[:-1].numel(), x.device)


def attention_arguments(
    op: str, dropout: Dropout | None, queries: Tensor, keys: Tensor
) -> tuple[Any, ...]:
    """The arguments of SCHEMA and KEYS_SCHEMA for (tokens, heads, width)."""
    if dropout is None or threshold(dropout.p) == 0:
        return (*NO_DROPOUT, None, 0)
    return (
        *dropout.arguments(op, queries.shape[0], queries.device),
        *dropout.key_arguments(op, keys.shape[0], keys.device),
    )


def philox(counter: Sequence[Any], key: Sequence[int], rounds: int = ROUNDS) -> tuple[Any, ...]:
    """Four 32-bit words per counter; counter words are ints or int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap around, but their 64 bits are right: mask after the shift
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (p1 >> 32 & _LOW) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = (p0 >> 32 & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def tie_break(word: Any) -> Any:
    """The lower halves of u for the two decisions of the word before this one."""
    mixed = word * _WEYL[0] & _LOW
    return mixed ^ mixed >> 15


@lru_cache(maxsize=4096)
def derive_key(seed: int, step: int, site: int) -> tuple[int, int]:
    """The Philox key of one dropout site in one step."""
    words = philox((seed & _LOW, seed >> 32, step, site), (0, 0), _KEY_ROUNDS)
    return words[0], words[1]


def threshold(p: float) -> int:
    """Words below it drop: p rounded to a multiple of 2^-24, in units of 2^-32."""
    return min(round(p * 2**24), 2**24 - 1) << 8


def keep_scale(p: float) -> float:
    """1 / P(keep), for the P(keep) that threshold realises."""
    return 2**32 / (2**32 - threshold(p))


def _decide(
    width: int,
    position: Tensor,
    plane: Tensor | int,
    sample: Tensor,
    p: float,
    key: tuple[int, int],
) -> Tensor:
    """The decisions, True = kept, for the first `width` columns: a last axis is added."""
    tiles = -(-width // TILE)
    lanes = torch.arange(16 * tiles, device=position.device)
    plane = plane if isinstance(plane, int) else plane[..., None]
    counter = (lanes, position[..., None] & _LOW, plane, sample[..., None] & _LOW)
    words = torch.broadcast_tensors(*philox(counter, key))

    def halves(words: Sequence[Tensor]) -> Tensor:
        both = torch.stack([torch.stack([w & 0xFFFF, w >> 16], -1) for w in words], -3)
        tiled = both.unflatten(-2, (tiles, 16))  # (..., word, tile, lane, half)
        return tiled.movedim(-4, -3).flatten(-4)[..., :width]

    upper, lower = halves(words), halves([tie_break(w) for w in (*words[1:], words[0])])
    return (upper << 16 | lower) >= threshold(p)


def keep_mask(
    shape: Sequence[int],
    device: torch.device,
    p: float,
    seed: int,
    step: int,
    site: int,
    sample_ids: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The decisions, True = kept, for rows of features shaped (..., D)."""
    rows = torch.Size(shape[:-1]).numel()
    if positions is None:
        positions = torch.arange(rows, device=device)
    if sample_ids is None:
        sample_ids = torch.zeros(1, dtype=torch.int64, device=device)
    key = derive_key(seed, step, site)
    keep = _decide(shape[-1], positions.flatten(), 0, sample_ids.flatten(), p, key)
    return keep.expand(rows, shape[-1]).reshape(shape)


def keep_heads(
    num_heads: int,
    first_head: int,
    sample_ids: Tensor,  # (queries,)
    positions: Tensor,  # (queries,)
    key_positions: Tensor,  # (keys,)
    p: float,
    seed: int,
    step: int,
    site: int,
) -> Tensor:
    """The decisions, True = kept, for the probabilities of an attention, (heads, queries, keys)."""
    plane = torch.arange(num_heads, device=positions.device)[:, None] + 1 + first_head
    width = int(key_positions.max()) + 1
    keep = _decide(width, positions, plane, sample_ids, p, derive_key(seed, step, site))
    return keep[..., key_positions]


def apply_dropout(x: Tensor, p: float, *coordinates: Any) -> Tensor:
    """Plain PyTorch dropout with the arguments of SCHEMA, for references and composites."""
    if p == 0.0:
        return x
    keep = keep_mask(x.shape, x.device, p, *coordinates)
    return torch.where(keep, x * keep_scale(p), 0.0)
