"""Means of what was measured, and of differences of pairs, with intervals and an exact test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flipper.statistics.between import over_seeds
from flipper.statistics.intervals import Interval

RESAMPLES = 99_999
"""Signs that are tried where there are too many differences for all of them."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean of so many values. interval: None where it can't be told, from fewer than two values."""

    count: int
    mean: float | None
    interval: Interval | None


def mean_of(values: Sequence[float], confidence: float = 0.95) -> Mean:
    """Mean and Student's t interval of independent values, as over_seeds has them; of none there is no mean."""
    if not values:
        return Mean(0, None, None)
    found = over_seeds(values, confidence)
    return Mean(len(values), found.mean, found.interval)


def sign_flip(differences: Sequence[float]) -> float:
    """P value of "of each pair the two may be swapped", two-sided: how often the mean is as far from 0 as that seen.

    Exact, over all signs, up to 16 differences that aren't 0; above that over 99,999 random ones, always the same.
    1 where all are 0. Source: R. A. Fisher, The Design of Experiments (1935), section 21.
    """
    import numpy as np

    moved = np.array([each for each in differences if each], dtype=np.float64)
    if not len(moved):
        return 1.0
    seen = abs(moved.sum()) * (1 - 1e-12)  # sums in another order differ by rounding
    if len(moved) <= 16:
        sums = np.zeros(1)
        for each in moved:
            sums = np.concatenate([sums + each, sums - each])
        return float(np.mean(np.abs(sums) >= seen))
    words = np.random.Philox(key=[0, 0])
    further = 0
    for first in range(0, RESAMPLES, 4096):
        rows = min(4096, RESAMPLES - first)
        bits = np.unpackbits(words.random_raw(rows * -(-len(moved) // 64)).view(np.uint8)).reshape(rows, -1)
        sums = (1.0 - 2.0 * bits[:, : len(moved)]) @ moved
        further += int(np.count_nonzero(np.abs(sums) >= seen))
    return (further + 1) / (RESAMPLES + 1)
