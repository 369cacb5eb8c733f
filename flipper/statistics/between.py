"""How much a result varies between training runs that differ in their seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from flipper.errors import UsageError
from flipper.statistics.intervals import Interval
from flipper.statistics.ranges import check_confidence


@dataclass(frozen=True, slots=True)
class OverSeeds:
    """One value a training seed, and what they say of other seeds."""

    values: tuple[float, ...]
    mean: float
    deviation: float | None
    """Standard deviation between seeds (divisor n - 1); None with one seed."""
    interval: Interval | None
    """Where the mean over all seeds may lie; None with one seed."""

    @property
    def one_run(self) -> bool:
        """Whether the result speaks of one training run only."""
        return len(self.values) == 1


def over_seeds(values: Sequence[float], confidence: float = 0.95) -> OverSeeds:
    """Mean, spread and Student's t interval of one value per training seed, seeds being a sample of all seeds.

    The interval is not cut to the values' range: with few seeds it may reach beyond (3 seeds: +- 4.3 standard errors).
    Where all seeds gave the same value it is a point; the trials' own sampling error is not in it then.
    Raises UsageError without values.
    Source: Student, Biometrika 6 (1908) 1-25.
    """
    from scipy.special import stdtrit

    check_confidence(confidence)
    if not len(values):
        raise UsageError("seeds: no value to average; at least one training seed is needed")
    mean = fmean(values)
    if len(values) == 1:
        return OverSeeds(tuple(values), mean, None, None)
    deviation = stdev(values)
    reach = -float(stdtrit(len(values) - 1, (1 - confidence) / 2)) * deviation / sqrt(len(values))
    return OverSeeds(tuple(values), mean, deviation, Interval(mean - reach, mean + reach))
