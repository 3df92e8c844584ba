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
    """

    p: float  # probability of a zero, rounded to a multiple of 2^-24
    seed: int
    step: int = 0
    site: int = 0
    sample_ids: Tensor | None = None  # (T,), 0 <= id < 2^32
    positions: Tensor | None = None  # (T,)

    def __post_init__(self) -> None:
        if not 0.0 <= self.p < 1.0:
            raise ValueError(f"dropout: p must lie in [0, 1); got {self.p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"dropout: seed must lie in [0, 2^63); got {self.seed}")
        for name in ("step", "site"):
            if not 0 <= getattr(self, name) < 2**32:
                raise ValueError(
                    f"dropout: {name} must lie in [0, 2^32); got {getattr(self, name)}"
                )

    def check(self, op: str, x: Tensor) -> None:
        """Refuse coordinates that do not describe the rows of x, (..., D)."""
        rows = x.shape[:-1].numel()
        for name in ("sample_ids", "positions"):
            ids = getattr(self, name)
            if ids is not None and (
                ids.numel() != rows or ids.dtype != torch.int64 or ids.device != x.device
            ):
                raise ValueError(
                    f"{op}: dropout.{name} must hold one int64 per row on {x.device}; got "
                    f"{tuple(ids.shape)} {ids.dtype} on {ids.device} for {rows} rows"
                )


# What every op with a dropout takes at the end of its schema, and the arguments that fill it.
SCHEMA = "float p, SymInt seed, SymInt step, SymInt site, Tensor? sample_ids, Tensor? positions"
NO_DROPOUT = (0.0, 0, 0, 0, None, None)


def op_arguments(op: str, dropout: Dropout | None, x: Tensor) -> tuple[Any, ...]:
    """The arguments of SCHEMA, checked against the rows of x."""
    if dropout is None or threshold(dropout.p) == 0:
        return NO_DROPOUT
    dropout.check(op, x)
    ids, positions = (
        t if t is None else t.reshape(-1).contiguous()
        for t in (dropout.sample_ids, dropout.positions)
    )
    return (dropout.p, dropout.seed, dropout.step, dropout.site, ids, positions)


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
    width = shape[-1]
    rows = torch.Size(shape[:-1]).numel()
    if positions is None:
        positions = torch.arange(rows, device=device)
    if sample_ids is None:
        sample_ids = torch.zeros(1, dtype=torch.int64, device=device)
    tiles = -(-width // TILE)
    lanes = torch.arange(16 * tiles, device=device)
    counter = (lanes, positions.view(-1, 1) & _LOW, 0, sample_ids.view(-1, 1) & _LOW)
    words = torch.broadcast_tensors(*philox(counter, derive_key(seed, step, site)))

    def halves(words: Sequence[Tensor]) -> Tensor:
        both = torch.stack([torch.stack([w & 0xFFFF, w >> 16], -1) for w in words])
        return both.view(4, -1, tiles, 32).permute(1, 2, 0, 3).reshape(-1, TILE * tiles)[:, :width]

    upper, lower = halves(words), halves([tie_break(w) for w in (*words[1:], words[0])])
    keep = (upper << 16 | lower) >= threshold(p)
    return keep.expand(rows, width).reshape(shape)


def apply_dropout(x: Tensor, p: float, *coordinates: Any) -> Tensor:
    """Plain PyTorch dropout with the arguments of SCHEMA, for references and composites."""
    if p == 0.0:
        return x
    keep = keep_mask(x.shape, x.device, p, *coordinates)
    return torch.where(keep, x * keep_scale(p), 0.0)
