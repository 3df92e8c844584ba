"""PackedBatch: the one shape of data from loader to loss. Sequences lie end to end, unpadded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

_NO_TARGET = -100
_EMPTY = "a batch needs at least one sequence; got none: skip empty batches in the loader"

Ids = Tensor | Sequence[int]


@dataclass(frozen=True, eq=False, repr=False)
class PackedBatch:
    """A batch of B sequences as T tokens without padding; sequences may be empty, B may not be 0.

    Dtypes, shapes and devices are always checked. Rules about values are checked on the CPU only,
    because reading a GPU tensor would stall its stream.
    """

    tokens: Tensor  # (T, ...), int32 or int64 ids, or floating features such as image patches
    cu_seqlens: Tensor  # (B + 1,), int32: sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1]
    max_seqlen: int
    positions: Tensor  # (T,), int64: where in its sequence a token stands
    sample_ids: Tensor  # (B,), int64: unique, below 2**32; dropout is drawn by them
    targets: Tensor  # (T,), int64, -100 where a token has none

    def __post_init__(self) -> None:
        self._check_structure()
        if self.tokens.device.type == "cpu":
            self._check_values()

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Ids],
        targets: Sequence[Ids] | None = None,
        sample_ids: Ids | None = None,
    ) -> "PackedBatch":
        """Pack id sequences (n,), or feature sequences (n, ...); without targets all are -100."""
        rows = [_as_tensor(row) for row in sequences]
        if not rows:
            raise ValueError(_EMPTY)
        device = rows[0].device
        if targets is None:
            targets = [torch.full(row.shape[:1], _NO_TARGET, device=device) for row in rows]
        if len(targets) != len(rows):
            raise ValueError(f"{len(rows)} sequences but {len(targets)} targets: give each its own")
        target_rows = [_as_tensor(target, device, widen=True) for target in targets]
        for i, (row, target) in enumerate(zip(rows, target_rows, strict=True)):
            if row.ndim == 0 or len({(x.dtype, x.device, x.shape[1:]) for x in (rows[0], row)}) > 1:
                raise ValueError(
                    "sequences must be (n, ...), alike in dtype, trailing shape and device; "
                    f"sequence {i} is {_describe(row)} and sequence 0 {_describe(rows[0])}"
                )
            wanted = (row.shape[:1], torch.int64, device)
            if (target.shape, target.dtype, target.device) != wanted:
                raise ValueError(
                    f"sequence {i} has {len(row)} tokens but its targets have {target.numel()}, as "
                    f"{_describe(target)}: give each token an int64 id on {device}, -100 for none"
                )
        lengths = [len(row) for row in rows]
        return cls._from_lengths(torch.cat(rows), lengths, torch.cat(target_rows), sample_ids)

    @classmethod
    def from_padded(
        cls,
        tokens: Tensor,  # (B, S, ...)
        mask: Tensor,  # (B, S), True or 1 where a token is real, in any pattern
        targets: Tensor | None = None,  # (B, S); those on padding are dropped
        sample_ids: Ids | None = None,
    ) -> "PackedBatch":
        """Drop the padding; positions count the real tokens of a row. Reads the mask's values."""
        if targets is None:
            targets = torch.full_like(mask, _NO_TARGET, dtype=torch.int64)
        shapes = [tuple(x.shape) for x in (tokens, mask, targets)]
        if tokens.ndim < 2 or not shapes[0][:2] == shapes[1] == shapes[2]:
            raise ValueError(
                "tokens must be (B, S, ...), mask and targets (B, S); "
                f"got {', '.join(map(str, shapes))}: give each token one entry"
            )
        real = mask.bool()
        if mask.is_floating_point() or (mask.dtype != torch.bool and (mask != real).any()):
            raise ValueError(
                f"mask must be bool or integers 0 and 1; got {mask.dtype} with values "
                f"{mask.unique().tolist()[:8]}: pass a bool mask, True where a token is real"
            )
        kept = real.flatten().nonzero().squeeze(1)
        lengths = real.sum(1).tolist()
        targets = _as_tensor(targets, widen=True).flatten()[kept]
        return cls._from_lengths(tokens.flatten(0, 1)[kept], lengths, targets, sample_ids)

    @property
    def num_sequences(self) -> int:
        return self.sample_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Tensor:
        """Tokens in each sequence, (B,) int32."""
        return self.cu_seqlens.diff()

    @property
    def token_sample_ids(self) -> Tensor:
        """The sample id of each token, (T,) int64; made once, when first read."""
        # functools.cached_property takes a lock on Python 3.11, which torch.compile cannot trace
        if "_token_sample_ids" not in self.__dict__:
            self.__dict__["_token_sample_ids"] = self._per_token(self.sample_ids)
        return self.__dict__["_token_sample_ids"]

    @property
    def target_rows(self) -> Tensor:
        """The rows that carry a target, (N,) int64; made once, when first read.

        A GPU waits for their number: read them before `to`, which takes them along.
        """
        if "_target_rows" not in self.__dict__:
            self.__dict__["_target_rows"] = (self.targets != _NO_TARGET).nonzero().squeeze(1)
        return self.__dict__["_target_rows"]

    @property
    def starts(self) -> Tensor:
        """Whether a sequence starts at a row, (T,) bool."""
        is_start = torch.zeros(self.num_tokens + 1, dtype=torch.bool, device=self.tokens.device)
        is_start[self.cu_seqlens[:-1].long()] = True  # empty sequences at the end start at row T
        return is_start[:-1]

    @property
    def ends(self) -> Tensor:
        """Whether a sequence ends with a row, (T,) bool."""
        is_end = torch.zeros(self.num_tokens + 1, dtype=torch.bool, device=self.tokens.device)
        is_end[self.cu_seqlens[1:].long()] = True  # those before the first row end at row -1
        return is_end[1:]

    def to_padded(self, padding: float = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, S, ...), mask (B, S) and targets (B, S), padded on the right to max_seqlen."""
        rows, columns, device = self.num_sequences, self.max_seqlen, self.tokens.device
        shift = torch.arange(rows, device=device) * columns - self.cu_seqlens[:-1]
        slots = torch.arange(self.num_tokens, device=device) + self._per_token(shift)

        def pad(packed: Tensor, value: float) -> Tensor:
            padded = packed.new_full((rows * columns, *packed.shape[1:]), value)
            return padded.index_copy(0, slots, packed).view(rows, columns, *packed.shape[1:])

        mask = torch.arange(columns, device=device) < self.lengths[:, None]
        return pad(self.tokens, padding), mask, pad(self.targets, _NO_TARGET)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "PackedBatch":
        """This batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedBatch":
        """A copy in page-locked memory, from which `to(device, non_blocking=True)` can overlap."""
        if not torch.accelerator.is_available():
            raise ValueError("pin_memory needs an accelerator; got none: use the batch as it is")
        return self._map(lambda tensor: tensor.pin_memory())

    def split(self, num_sequences: int | Sequence[int]) -> list["PackedBatch"]:
        """Pieces of at most `num_sequences` sequences, or of the listed counts, as `torch.split`.

        Pieces are views of this batch. On a GPU this waits once, to read cu_seqlens.
        """
        total, counts = self.num_sequences, num_sequences
        if isinstance(counts, int):
            starts = range(0, total, counts) if counts > 0 else ()
            counts = [min(counts, total - start) for start in starts]
        if sum(counts) != total or min(counts) < 1:
            raise ValueError(
                "split takes a positive number of sequences, or positive counts that sum to all "
                f"{total}; got {num_sequences}"
            )
        offsets = self.cu_seqlens.tolist()
        pieces = []
        for first, last in pairwise(accumulate(counts, initial=0)):
            bounds = offsets[first : last + 1]
            rows = slice(bounds[0], bounds[-1])
            cut = {name: getattr(self, name)[rows] for name in ("tokens", "positions", "targets")}
            piece = self._unchecked(
                cu_seqlens=self.cu_seqlens[first : last + 1] - bounds[0],
                max_seqlen=max(end - start for start, end in pairwise(bounds)),
                sample_ids=self.sample_ids[first:last],
                **cut,
            )
            pieces.append(piece)
        return pieces

    def __eq__(self, other: object) -> bool:
        """Equal in every field, exactly, dtype and device included."""
        if not isinstance(other, PackedBatch):
            return NotImplemented
        pairs = zip(self._tensors().values(), other._tensors().values(), strict=True)
        return self.max_seqlen == other.max_seqlen and all(
            a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in pairs
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        size = f"{self.num_sequences} sequences, {self.num_tokens} tokens"
        return f"PackedBatch({size}, longest {self.max_seqlen}, {_describe(self.tokens)})"

    @classmethod
    def _from_lengths(
        cls, tokens: Tensor, lengths: list[int], targets: Tensor, sample_ids: Ids | None
    ) -> "PackedBatch":
        total, device = len(tokens), tokens.device
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], device=device)
        starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=total)
        if sample_ids is None:
            sample_ids = torch.arange(len(lengths), device=device)
        return cls(
            tokens=tokens,
            cu_seqlens=cu_seqlens.int(),
            max_seqlen=max(lengths, default=0),
            positions=torch.arange(total, device=device) - starts,
            sample_ids=_as_tensor(sample_ids, device, widen=True),
            targets=targets,
        )

    @classmethod
    def _unchecked(cls, **fields: Any) -> "PackedBatch":
        # what is cut or copied from a checked batch is sound, and a copy still in flight
        # (non_blocking) must not be read
        batch = object.__new__(cls)
        batch.__dict__.update(fields)
        return batch

    def _tensors(self) -> dict[str, Tensor]:
        names = ("tokens", "cu_seqlens", "positions", "sample_ids", "targets")
        return {name: getattr(self, name) for name in names}

    def _map(self, function: Callable[[Tensor], Tensor]) -> "PackedBatch":
        derived = ("_token_sample_ids", "_target_rows")
        made = {name: self.__dict__[name] for name in derived if name in self.__dict__}
        tensors = {name: function(x) for name, x in (self._tensors() | made).items()}
        return self._unchecked(max_seqlen=self.max_seqlen, **tensors)

    def _per_token(self, values: Tensor) -> Tensor:
        # without output_size a GPU would have to tell the sum of the lengths first
        return values.repeat_interleave(self.lengths, output_size=self.num_tokens)

    def _check_structure(self) -> None:
        tokens, is_ids = self.tokens, self.tokens.dtype in (torch.int32, torch.int64)
        is_sized = tokens.ndim > 0 and len(tokens) < 2**31  # cu_seqlens is int32
        if not is_sized or not (is_ids or tokens.is_floating_point()):
            raise ValueError(
                "tokens must be (T, ...) with T below 2**31, int32 or int64 ids or floating "
                f"features; got {_describe(tokens)}: convert them, or make smaller batches"
            )
        num_sequences = self.cu_seqlens.numel() - 1
        if num_sequences < 1:
            raise ValueError(_EMPTY)
        for name, dtype, size in (
            ("cu_seqlens", torch.int32, num_sequences + 1),
            ("positions", torch.int64, len(tokens)),
            ("sample_ids", torch.int64, num_sequences),
            ("targets", torch.int64, len(tokens)),
        ):
            tensor = getattr(self, name)
            if (tensor.shape, tensor.dtype, tensor.device) != ((size,), dtype, tokens.device):
                raise ValueError(
                    f"{name} of {num_sequences} sequences, {len(tokens)} tokens must be "
                    f"({size},) {dtype} on {tokens.device}; got {_describe(tensor)}: convert it"
                )
        if not isinstance(self.max_seqlen, int):
            raise ValueError(f"max_seqlen must be an int; got {self.max_seqlen!r}: pass int(...)")

    def _check_values(self) -> None:
        offsets = self.cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(offsets)]
        if offsets[0] != 0 or offsets[-1] != self.num_tokens or min(lengths) < 0:
            raise ValueError(
                f"cu_seqlens must start at 0, not decrease and end at {self.num_tokens} tokens; "
                f"got {offsets[0]} to {offsets[-1]} with a smallest step of {min(lengths)}: "
                "pass the running sum of the lengths"
            )
        if self.max_seqlen != max(lengths):
            raise ValueError(
                f"max_seqlen must be the largest length; got {self.max_seqlen}: pass {max(lengths)}"
            )
        if not self.tokens.is_floating_point():
            self._refuse(self.tokens, self.tokens < 0, "token ids must not be negative")
        self._refuse(self.positions, self.positions < 0, "positions must not be negative")
        is_wrong = (self.targets < 0) & (self.targets != _NO_TARGET)
        self._refuse(self.targets, is_wrong, "targets must be at least 0, or -100 for none")
        ids, counts = self.sample_ids.unique(return_counts=True)
        is_wrong = (ids < 0) | (ids >= 2**32) | (counts > 1)
        if is_wrong.any():
            raise ValueError(
                "sample_ids must be unique and at least 0 and below 2**32, since dropout is drawn "
                f"by them in 32 bits; got {ids[is_wrong].tolist()[:8]}: number samples from 0"
            )

    def _refuse(self, values: Tensor, is_wrong: Tensor, rule: str) -> None:
        if is_wrong.any():
            row, *rest = is_wrong.nonzero()[0].tolist()
            sequence = int(torch.searchsorted(self.cu_seqlens[1:], row, right=True))
            raise ValueError(
                f"{rule}; got {int(values[row, *rest])} in sequence {sequence} at its token "
                f"{row - int(self.cu_seqlens[sequence])}: correct the data"
            )


def _as_tensor(values: Ids, device: torch.device | None = None, widen: bool = False) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, device=device)
    is_empty_list = tensor is not values and tensor.shape == (0,)  # which torch takes as floating
    return tensor.long() if is_empty_list or (widen and tensor.dtype == torch.int32) else tensor


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
