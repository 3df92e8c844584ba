"""Statistics of the generator on 10^8 draws.  python -m benchmarks.bench_random

Chi-square of how many of a group of decisions are kept and of pairs of neighbours along each
coordinate, the number of runs: the normal deviate of each. Not timings: beyond 5 is a fault.
"""

import math

import torch

from benchmarks.harness import Report
from taut.ops import Dropout, dropout

ROWS, WIDTH = 4096, 4096
P = 0.3


def kept(seed: int, step: int, site: int, sample: int, rows: int = ROWS) -> torch.Tensor:
    ids = torch.full((rows,), sample)
    where = Dropout(P, seed, step, site, sample_ids=ids, positions=torch.arange(rows))
    return dropout(torch.ones(rows, WIDTH, dtype=torch.bfloat16), where) != 0


def deviate(statistic: float, freedom: int) -> float:
    """The normal deviate of a chi-square statistic (Wilson and Hilferty)."""
    third = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - third)) / math.sqrt(third)


def chi_square(counts: torch.Tensor, chances: torch.Tensor) -> float:
    expected = chances.double() * counts.sum()
    return deviate(((counts - expected) ** 2 / expected).sum().item(), len(counts) - 1)


def binomial(groups_of: int, keep: float) -> torch.Tensor:
    return torch.tensor(
        [
            math.comb(groups_of, k) * keep**k * (1 - keep) ** (groups_of - k)
            for k in range(groups_of + 1)
        ]
    )


def pairs(a: torch.Tensor, b: torch.Tensor) -> float:
    """Chi-square of the four outcomes of two decisions against independence."""
    counts = torch.bincount((a.to(torch.uint8) * 2 + b).flatten(), minlength=4)
    keep = 1 - round(P * 2**24) / 2**24
    one = torch.tensor([1 - keep, keep], dtype=torch.float64)
    return chi_square(counts, torch.outer(one, one).flatten())


def main() -> None:
    report = Report("random", "cpu")
    keep = 1 - round(P * 2**24) / 2**24
    total, ones, groups = 0, 0, torch.zeros(9, dtype=torch.int64)
    for sample in range(6):  # 6 x 2^24 draws
        mask = kept(1, 0, 0, sample)
        total += mask.numel()
        ones += int(mask.sum())
        groups += torch.bincount(mask.view(-1, 8).sum(1), minlength=9)
    frequency = (ones - total * keep) / math.sqrt(total * keep * (1 - keep))
    first = kept(1, 0, 0, 0)
    runs = (first[:, 1:] != first[:, :-1]).sum().item()
    pairs_seen = ROWS * (WIDTH - 1)
    change = 2 * keep * (1 - keep)
    # two changes next to each other share the decision between them
    overlap = keep * (1 - keep) - change**2
    spread = math.sqrt(pairs_seen * change * (1 - change) + 2 * (pairs_seen - ROWS) * overlap)
    figures = {
        "frequency": frequency,
        "eights": chi_square(groups, binomial(8, keep)),
        "runs": (runs - pairs_seen * change) / spread,
        "columns": pairs(first[:, 1::2], first[:, ::2]),
        "halves of a word": pairs(first.view(-1, 2)[:, 0], first.view(-1, 2)[:, 1]),
        "lanes": pairs(first.view(-1, 2, 2)[:, 0], first.view(-1, 2, 2)[:, 1]),
        "words": pairs(first.view(-1, 2, 32)[:, 0], first.view(-1, 2, 32)[:, 1]),
        "tiles": pairs(first.view(-1, 2, 128)[:, 0], first.view(-1, 2, 128)[:, 1]),
        "positions": pairs(first[1::2], first[::2]),
        "samples": pairs(first, kept(1, 0, 0, 1)),
        "steps": pairs(first, kept(1, 1, 0, 0)),
        "sites": pairs(first, kept(1, 0, 1, 0)),
        "seeds": pairs(first, kept(2, 0, 0, 0)),
    }
    report.note(
        f"deviates over {total:.1e} draws, p={P}",
        **{name: round(z, 2) for name, z in figures.items()},
        target=5,
        met=all(abs(z) < 5 for z in figures.values()),
    )
    report.write()


if __name__ == "__main__":
    main()
