"""What a model returns in training: sums and counts, to be divided when all counts are known."""

from typing import NamedTuple

from torch import Tensor


class Loss(NamedTuple):
    """The sum of a loss over its targets, and how many they are.

    Over micro-batches and ranks sums and counts are added, and divided in the end: a mean of means
    would weigh a target by the batch it came in. A model of two tasks has (2,) of each.
    """

    sum: Tensor
    count: Tensor  # type: ignore[assignment]  # in the place of tuple's own, which nobody calls

    @property
    def mean(self) -> Tensor:
        """The mean over targets, added over tasks; 0 for a task without targets."""
        return (self.sum / self.count.clamp(min=1)).sum()
