"""Targets for ids, drawn for each sample by (seed, epoch, sample id) alone: a sample is masked the
same way in any batch, on any rank, in any order."""

from typing import Any

import numpy as np

NO_TARGET = -100


def _draws(seed: int, epoch: int, sample_id: int) -> Any:
    key = np.array([seed & (2**64 - 1), (epoch << 32) | sample_id], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def mask_words(
    ids: Any,
    *,
    seed: int,
    epoch: int,
    sample_id: int,
    mask_id: int,
    vocab_size: int,
    first_id: int = 5,
    fraction: float = 0.15,
) -> tuple[Any, Any]:
    """Input and targets of masked words (Devlin et al., 2019): of the chosen 80 % are masked, 10 %
    are another word, 10 % stay. Ids below first_id are special and never chosen."""
    draws = _draws(seed, epoch, sample_id)
    is_word = ids >= first_id
    chosen = is_word & (draws.random(len(ids)) < fraction)
    if is_word.any() and not chosen.any():  # a short text teaches something too
        words = np.flatnonzero(is_word)
        chosen[words[int(draws.integers(len(words)))]] = True
    kind = draws.random(len(ids))
    others = draws.integers(first_id, vocab_size, len(ids))
    inputs = np.where(chosen & (kind < 0.8), mask_id, ids)
    inputs = np.where(chosen & (kind >= 0.9), others, inputs)
    return inputs, np.where(chosen, ids, NO_TARGET)


def causal(ids: Any) -> tuple[Any, Any]:
    """Input and targets of a language model: the next token, none behind the last."""
    return ids, np.append(ids[1:], NO_TARGET)
