"""Quantiles of what was measured, with intervals that assume no distribution."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor

from flipper.errors import UsageError
from flipper.statistics.intervals import Interval
from flipper.statistics.ranges import check_confidence


def quantile(
    values: Sequence[float], share: float = 0.5, confidence: float = 0.95
) -> tuple[float | None, Interval | None]:
    """The value below which `share` of all trials lie, and an interval between two of the values seen.

    The estimate interpolates between neighbours (R's type 7, numpy's default); None without values. The interval
    is exact: at most half of 1 - confidence on either side, whatever the distribution; None where there are too few
    values for that (the median at 95 % needs 6). Values may be infinite (never recovered) but not NaN.
    Source: W. J. Conover, Practical Nonparametric Statistics, 3rd ed. (1999), section 3.2.
    """
    check_confidence(confidence)
    if not 0 < share < 1:
        raise UsageError(f"share: {share} is not between 0 and 1")
    ordered = sorted(values)
    if any(value != value for value in ordered):
        raise UsageError("values: one is not a number; leave it out, or give infinity for what never came")
    return _interpolated(ordered, share), _between_values(ordered, share, (1 - confidence) / 2)


def median(values: Sequence[float], confidence: float = 0.95) -> tuple[float | None, Interval | None]:
    """quantile at one half."""
    return quantile(values, 0.5, confidence)


def _interpolated(ordered: list[float], share: float) -> float | None:
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low, high = ordered[floor(place)], ordered[ceil(place)]
    # Equal neighbours may be infinite, and infinity less infinity is no number.
    return low if low == high else low + (high - low) * (place - floor(place))


def _between_values(ordered: list[float], share: float, tail: float) -> Interval | None:
    """From the r-th to the s-th value: as few values as leave no more than `tail` of the binomial outside each end."""
    from scipy.special import bdtr, bdtrc

    number = len(ordered)
    low = max((rank for rank in range(1, number + 1) if bdtr(rank - 1, number, share) <= tail), default=None)
    high = min((rank for rank in range(1, number + 1) if bdtrc(rank - 1, number, share) <= tail), default=None)
    return None if low is None or high is None else Interval(ordered[low - 1], ordered[high - 1])
