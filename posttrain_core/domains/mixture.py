"""How problems are shared out between domains by weight."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

_GOLDEN = (5**0.5 - 1) / 2


def training_counts(weights: Sequence[float], total: int) -> list[int]:
    """How many of the first `total` training problems belong to each domain.

    Problem k belongs to the domain in whose share of [0, 1) the k-th point of the golden-ratio sequence falls, so
    every stretch of problems holds about its share of every domain, and no count ever falls.
    """
    points = np.modf((np.arange(total) + 0.5) * _GOLDEN)[0]
    bounds = np.cumsum(weights) / np.sum(weights)
    owners = np.minimum(np.searchsorted(bounds, points, side="right"), len(weights) - 1)
    return [int(count) for count in np.bincount(owners, minlength=len(weights))]


def exact_counts(weights: Sequence[float], total: int) -> list[int]:
    """`total` shared by weight, each share rounded up or down."""
    bounds = [0, *(round(total * part / sum(weights)) for part in accumulate(weights))]
    return [high - low for low, high in pairwise(bounds)]
