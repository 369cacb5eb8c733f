"""Break-even: the failure rate at which two strategies cost the same, from their differences over a sweep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flipper.statistics.between import over_seeds

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
HOUR: Final = 3600.0
ENDLESS: Final = 100.0
"""What stands for an endless overhead in a mean; see simulator.HOPELESS."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """How much more of a quantity one strategy has than the other.

    mtbfs: seconds, ascending. rows: for each, one difference a seed, the same seeds in each row; infinite where one of
    the two never came to its end, NaN where nothing is known. seed: of the resampling.
    """

    one: str
    other: str
    quantity: str
    mtbfs: Sequence[float]
    rows: Sequence[Sequence[float]]
    seed: int = 0


@dataclass(frozen=True)
class BreakEven:
    """Where two strategies cost the same. mtbf: seconds; None where they don't, or it lies between low and high only.

    low, high: interval of 95 %; None for a bound beyond the sweep, or where one seed tells none. verdict: in words.
    """

    mtbf: float | None
    low: float | None
    high: float | None
    verdict: str

    def record(self) -> dict[str, object]:
        """As columns of a row."""
        rate = None if self.mtbf is None else HOUR / self.mtbf
        return {
            "break_even_mtbf_seconds": self.mtbf, "break_even_low": self.low, "break_even_high": self.high,
            "break_even_failures_per_hour": rate, "verdict": self.verdict,
        }  # fmt: skip


def break_evens(difference: Difference) -> list[BreakEven]:
    """The crossings of the mean difference, MTBF ascending; one that says how it is where there is none.

    Between two rates of the sweep the mean is taken to be straight over the logarithm of the MTBF. The interval is the
    percentile one of a bootstrap over seeds (Efron, Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13),
    of all rates together, since they share their seeds.
    """
    rows = np.array(difference.rows, dtype=np.float64)
    endless = [any(map(math.isinf, row)) for row in difference.rows]
    rows = np.clip(rows.round(12), -ENDLESS, ENDLESS)  # below that it is the rounding of sums of seconds
    logs = np.log(np.array(difference.mtbfs))
    means = _means(rows)
    places = _crossings(means)
    if not places:
        return [BreakEven(None, None, None, _constant(difference, rows, means))]
    found = []
    for left, right in places:
        at: float | None = math.exp(_between(means, logs, left, right))
        low, high = _interval(difference, rows, logs, means[left]) if len(places) == 1 else (None, None)
        if endless[left] or endless[right]:  # no line leads there
            at, low, high = None, difference.mtbfs[left], difference.mtbfs[right]
        below, above = (difference.one, difference.other) if means[left] < 0 else (difference.other, difference.one)
        verdict = f"{below} has less at shorter MTBFs, {above} at longer ones"
        if len(places) > 1:
            verdict = f"one of {len(places)} crossings, so the order is not told apart: here {verdict}"
        found.append(BreakEven(at, low, high, verdict))
    return found


def _means(rows: Numbers) -> Numbers:
    """Mean of each row over the seeds of which something is known; NaN where of none is."""
    return np.array([_mean(row) for row in rows])


def _mean(row: Numbers) -> float:
    known = row[~np.isnan(row)]
    return float(known.mean()) if len(known) else math.nan


def _crossings(means: Numbers) -> list[tuple[int, int]]:
    """Neighbours, those without a difference left out, whose means have different signs."""
    told = [number for number, mean in enumerate(means) if not np.isnan(mean) and mean != 0]
    return [(left, right) for left, right in itertools.pairwise(told) if (means[left] < 0) != (means[right] < 0)]


def _between(means: Numbers, logs: Numbers, left: int, right: int) -> float:
    """Where the straight line between two points is 0."""
    share = means[left] / (means[left] - means[right])
    return float(logs[left] + share * (logs[right] - logs[left]))


def _interval(difference: Difference, rows: Numbers, logs: Numbers, sign: float) -> tuple[float | None, float | None]:
    """Of the one crossing. sign: of the mean below it; a resample without a crossing has it beyond an end."""
    seeds = rows.shape[1]
    if seeds < 2:
        return None, None
    generator = np.random.Generator(np.random.Philox(key=difference.seed % 2**64))
    found = []
    for _ in range(RESAMPLES):
        means = _means(rows[:, generator.integers(seeds, size=seeds)])
        places = _crossings(means)
        told = [mean for mean in means if not np.isnan(mean) and mean != 0]
        if places:
            found.append(_between(means, logs, *places[0]))
        elif told:
            found.append(math.inf if (told[0] < 0) == (sign < 0) else -math.inf)
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(np.quantile(found, share, method="inverted_cdf")) for share in (tail, 1 - tail))
    return (None if math.isinf(low) else math.exp(low)), (None if math.isinf(high) else math.exp(high))


def _constant(difference: Difference, rows: Numbers, means: Numbers) -> str:
    """What there is to say without a crossing."""
    if np.isnan(means).all():
        return "not known: at no MTBF of the sweep have both come to their end"
    told = [mean for mean in means if not np.isnan(mean) and mean != 0]
    if not told:
        return "no difference at any MTBF of the sweep"
    less, more = (difference.one, difference.other) if told[0] < 0 else (difference.other, difference.one)
    apart = sum(_told_apart(row[~np.isnan(row)]) for row in rows)
    if rows.shape[1] > 1 and not apart:
        return "no break-even: not told apart at any MTBF of the sweep"
    where = f"told apart at {apart} of {len(rows)}" if rows.shape[1] > 1 else "by one seed only"
    return f"no break-even: {less} has no more than {more} at every MTBF of the sweep ({where})"


def _told_apart(values: Numbers) -> bool:
    """Whether an interval of the mean leaves 0 out."""
    between = over_seeds(values.tolist(), CONFIDENCE).interval if len(values) > 1 else None
    return between is not None and not between.low <= 0 <= between.high
