"""Batches by a budget of tokens: which samples, in which step, on which rank.

Nothing is padded, so nothing is gained by samples of like lengths: an epoch is one random order,
cut where the budget is full. The global batches depend on seed and epoch alone; ranks share each
one out, the longest samples first, to whoever has the least.
"""

from collections.abc import Iterator, Sequence

import numpy as np


class TokenBudgetSampler:
    """Iterates over lists of sample numbers, those of `rank`, of one epoch.

    budget_tokens is that of a global batch, over all ranks. A sample longer than that makes a batch
    of its own.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        budget_tokens: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if self.lengths.ndim != 1 or not len(self.lengths) or (self.lengths < 0).any():
            raise ValueError(
                "TokenBudgetSampler: lengths must be at least one number, none negative; got "
                f"{self.lengths.shape}"
            )
        if budget_tokens < 1 or not 0 <= rank < world_size:
            raise ValueError(
                "TokenBudgetSampler: budget_tokens must be positive and 0 <= rank < world_size; "
                f"got {budget_tokens}, rank {rank} of {world_size}"
            )
        self.budget_tokens, self.rank, self.world_size = budget_tokens, rank, world_size
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def global_batches(self) -> list[list[int]]:
        """All batches of the epoch, for any number of ranks."""
        key = np.array([self.seed & (2**64 - 1), self.epoch], dtype=np.uint64)
        order = np.random.Generator(np.random.Philox(key=key)).permutation(len(self.lengths))
        batches: list[list[int]] = [[]]
        tokens = 0
        for i in order.tolist():
            length = int(self.lengths[i])
            if batches[-1] and tokens + length > self.budget_tokens:
                batches.append([])
                tokens = 0
            batches[-1].append(i)
            tokens += length
        return batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.global_batches():
            yield self._share(batch)

    def __len__(self) -> int:
        return len(self.global_batches())

    def _share(self, batch: list[int]) -> list[int]:
        """This rank's samples of a batch; a rank may get none."""
        if self.world_size == 1:
            return batch
        loads = [0] * self.world_size
        mine = []
        for i in sorted(batch, key=lambda i: (-int(self.lengths[i]), i)):
            rank = loads.index(min(loads))
            loads[rank] += int(self.lengths[i])
            if rank == self.rank:
                mine.append(i)
        return mine
