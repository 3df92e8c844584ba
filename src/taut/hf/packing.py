"""From the padded tensors of transformers to packed rows, and back: once in, once out."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from taut.nn.blocks import Layout


class Left(Exception):
    """Why a call is left to transformers.

    is_expected: no news to whoever called. is_whole: what is below must be left too.
    """

    def __init__(self, reason: str, *, is_expected: bool = False, is_whole: bool = False) -> None:
        super().__init__(reason)
        self.is_expected, self.is_whole = is_expected, is_whole


@dataclass(frozen=True)
class Packing:
    """Which entries of a batch (B, S) are tokens, and where they stand packed."""

    shape: tuple[int, int]
    rows: Tensor | None  # of (B * S,); None: all
    layout: Layout

    @classmethod
    def of(
        cls, shape: tuple[int, int], is_token: Tensor | None, device: torch.device, seed: int | None
    ) -> "Packing":
        """Each row of the batch is a sequence of the entries where is_token (B, S)."""
        count, longest = shape
        if is_token is None or bool(is_token.all()):
            rows, lengths = None, torch.full((count,), longest, device=device)
        else:
            rows, lengths = is_token.flatten().nonzero().squeeze(1), is_token.sum(1)
        return cls(shape, rows, _layout(lengths, seed))

    @classmethod
    def of_flattened(cls, lengths: Tensor, seed: int | None) -> "Packing":
        """A batch (1, T) of sequences end to end."""
        return cls((1, int(lengths.sum())), None, _layout(lengths, seed))

    def pack(self, padded: Tensor) -> Tensor:
        """(B, S, ...) to (T, ...)."""
        flat = padded.expand(*self.shape, *padded.shape[2:]).flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def unpack(self, x: Tensor) -> Tensor:
        """(T, D) to (B, S, D), with zeros where there is no token."""
        if self.rows is not None:
            padded = x.new_zeros(self.shape[0] * self.shape[1], x.shape[1])
            x = padded.index_copy(0, self.rows, x)
        return x.view(*self.shape, -1)

    def columns(self) -> Tensor:
        """The column of each token, which is its position to most models."""
        count, longest = self.shape
        every = torch.arange(longest, device=self.layout.positions.device)
        return self.pack(every.expand(count, longest))


def _layout(lengths: Tensor, seed: int | None) -> Layout:
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    total = int(offsets[-1])
    starts = offsets[:-1].repeat_interleave(lengths, output_size=total)
    sample_ids = torch.arange(len(lengths), device=lengths.device)
    return Layout(
        offsets.int(),
        sample_ids.repeat_interleave(lengths, output_size=total),
        torch.arange(total, device=lengths.device) - starts,
        seed,
    )


def tokens_of_mask(mask: Tensor | None, shape: tuple[int, int], *, causal: bool) -> Tensor | None:
    """Which entries (B, S) a mask calls tokens: 2-D, or 4-D to that effect, bool or additive."""
    if mask is None:
        return None
    if mask.dim() == 2:
        is_token = mask.bool()
        if tuple(mask.shape) != shape or not bool((mask == is_token).all()):
            raise Left(f"an attention_mask {tuple(mask.shape)} that is not 0 and 1 for {shape}")
        return is_token
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[-1] != shape[1]:
        raise Left(f"an attention_mask shaped {tuple(mask.shape)}")
    seen = mask
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            seen = mask.bool()
        else:  # added to the scores: 0 where seen, so negative that nothing is left elsewhere
            seen = mask == 0
            if bool((mask[~seen] > -1e4).any()):
                raise Left("an attention_mask that adds more to scores than yes and no")
    seen = seen[:, 0].expand(shape[0], -1, -1)  # (B, 1 or S, S)
    is_token = seen.any(1)
    wanted = is_token[:, None, :]
    if causal:
        square = torch.ones(shape[1], shape[1], dtype=torch.bool, device=mask.device).tril()
        wanted = wanted & square
    rows = is_token if seen.shape[1] == shape[1] else is_token.new_ones(shape[0], 1)
    if (causal and seen.shape[1] != shape[1]) or bool(((seen != wanted) & rows[..., None]).any()):
        raise Left("an attention_mask that is neither of padding nor causal")
    return is_token


def flattened_lengths(
    position_ids: Tensor | None, shape: tuple[int, int], cu_seqlens: Tensor | None, start: int
) -> Tensor | None:
    """The lengths of sequences that lie end to end in a batch of one row, as
    DataCollatorWithFlattening makes it; None for an ordinary batch.

    A sequence begins where positions fall back to 0 (or `start`); any other break in their count
    means that a boundary was lost, which is refused rather than guessed.
    """
    if position_ids is None and cu_seqlens is None:
        return None
    lengths = None
    if position_ids is not None and shape[0] == 1 and tuple(position_ids.shape) == shape:
        ids = position_ids[0]
        is_start = torch.ones_like(ids, dtype=torch.bool)
        is_start[1:] = ids[1:] != ids[:-1] + 1
        if bool(((ids[is_start] != 0) & (ids[is_start] != start)).any()):
            raise ValueError(
                "accelerate: position_ids of sequences end to end must count up by one from "
                f"{start} or 0 in each; got {ids.tolist()[:16]}..: a boundary was lost, pass the "
                "position_ids of DataCollatorWithFlattening"
            )
        ends = [*is_start.nonzero().squeeze(1).tolist(), shape[1]]
        lengths = torch.tensor([b - a for a, b in pairwise(ends)], device=ids.device)
    if cu_seqlens is None:
        return None if lengths is None or len(lengths) == 1 else lengths
    given = cu_seqlens.flatten().diff().to(torch.int64)
    if shape[0] != 1 or int(given.sum()) != shape[1] or bool((given < 0).any()):
        raise ValueError(
            f"accelerate: cu_seq_lens_q must rise from 0 to the {shape[1]} tokens of a batch of "
            f"one row; got {cu_seqlens.flatten().tolist()[:16]} for a batch {shape}"
        )
    given = given[given > 0]
    if lengths is not None and not lengths.equal(given):
        raise ValueError(
            "accelerate: position_ids and cu_seq_lens_q name other boundaries; got lengths "
            f"{lengths.tolist()[:16]} and {given.tolist()[:16]}: pass one of the two"
        )
    return given
