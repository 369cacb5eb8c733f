"""Group-sequential stopping at a margin, reckoned exactly: where each look stops, how often, and what is covered.

Trials are hits or misses with one probability. Arrays hold numbers of hits or proportions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, gammaln, xlog1py, xlogy

from flipper.statistics.ranges import two_sided

Numbers = NDArray[Any]

FIRST, EVERY = 50, 25
"""The trials at the first look, and from one look to the next."""
GRID = 2000
"""Proportions up to one half at which coverage is computed, besides all at which it jumps."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Numbers of hits at which one look stops, and what leads there."""

    look: int
    """Trials at this look."""
    hits: Numbers
    ways: Numbers
    """Logarithm of the number of ways to come to these hits without having stopped before."""
    low: Numbers
    high: Numbers

    def chances(self, proportions: Numbers) -> Numbers:
        """Probability of stopping here with each number of hits (rows) for each proportion (columns)."""
        hits = self.hits[:, None]
        chances: Numbers = np.exp(
            self.ways[:, None] + xlogy(hits, proportions) + xlog1py(self.look - hits, -proportions)
        )
        return chances

    def part(self, chosen: Numbers) -> Stop:
        """Some of its hits."""
        return Stop(self.look, self.hits[chosen], self.ways[chosen], self.low[chosen], self.high[chosen])


def most_trials(margin: float, alpha: float) -> float:
    """A little more than the trials after which any outcome is known to the margin.

    The normal interval's number, and 1 / margin more for the exact interval, wider by about 1 / trials.
    """
    return (two_sided(1 - alpha) / (2 * margin)) ** 2 + 2 / margin + FIRST


def looks_until(margin: float, alpha: float, cap: int | None) -> tuple[int, ...]:
    """Trials at each look, up to the first at which any outcome is known to the margin, or up to the cap."""
    most = int(most_trials(margin, alpha))
    candidates = np.arange(FIRST, (most if cap is None else min(most, cap)) + EVERY + 1, EVERY)
    known = np.flatnonzero(_half_widths(candidates // 2, candidates, alpha) <= margin)
    looks = candidates[: known[0] + 1] if len(known) else candidates
    if cap is None or looks[-1] <= cap:
        return tuple(looks.tolist())
    return (*looks[looks < cap].tolist(), cap)


def bounds_at(looks: tuple[int, ...], margin: float, alpha: float) -> tuple[int, ...]:
    """Per look the most hits, up to half the trials, whose interval is narrow enough; -1 where none is.

    Found by halving: the interval widens with the hits up to half the trials.
    """
    trials = np.array(looks)
    narrow, wide = np.full(len(looks), -1), trials // 2 + 1
    while (wide - narrow).max() > 1:
        middle = (narrow + wide) // 2
        fits = (middle >= 0) & (_half_widths(np.maximum(middle, 0), trials, alpha) <= margin)
        apart = wide - narrow > 1
        narrow, wide = np.where(apart & fits, middle, narrow), np.where(apart & ~fits, middle, wide)
    return tuple(narrow.tolist())


def stops_at(looks: tuple[int, ...], bounds: tuple[int, ...], alpha: float) -> list[Stop]:
    """All ends: at each look the hits that stop there, with the ways to come to them past the looks before."""
    stops = []
    ways = _log_choose(looks[0])
    for look, bound, after in zip(looks, bounds, (*looks[1:], None), strict=True):
        hits = np.arange(look + 1)
        ends = (np.minimum(hits, look - hits) <= bound) | (after is None)
        ended = hits[ends & (ways > -inf)]
        stops.append(Stop(look, ended, ways[ended], *_exact(ended, np.full(len(ended), look), alpha)))
        if after is not None:
            ways = _ways_after(np.where(ends, -inf, ways), after - look)
    return stops


def least_coverage(stops: list[Stop]) -> float:
    """The least probability, over all proportions, that the interval at the stop holds the proportion.

    Computed on a fine grid and at every end of an interval, where coverage jumps; there the open interval gives the
    lesser of the limits from both sides. The rule is the same for hits and misses, so one half of the proportions do.
    """
    ends = np.concatenate([end for stop in stops for end in (stop.low, stop.high)])
    proportions = np.union1d(ends[(ends > 0) & (ends <= 0.5)], np.linspace(0, 0.5, GRID + 1)[1:])
    covered = np.zeros(len(proportions))
    for stop in stops:
        fewer = stop.hits * 2 <= stop.look
        for part in (stop.part(fewer), stop.part(~fewer)):
            near = _near(part, proportions)
            at = proportions[near]
            inside = (part.low[:, None] < at) & (at < part.high[:, None])
            covered[near] += np.where(inside, part.chances(at), 0).sum(axis=0)
    return float(covered.min())


def _near(stop: Stop, proportions: Numbers) -> slice:
    """The proportions at which such hits have a probability of more than 1e-19 (Hoeffding); the others are left out.

    That speeds the sum up sixfold at a margin of 0.01, and can only make coverage look smaller.
    """
    if not len(stop.hits):
        return slice(0, 0)
    reach = sqrt(22 / stop.look)
    ends = stop.hits[0] / stop.look - reach, stop.hits[-1] / stop.look + reach
    return slice(*np.searchsorted(proportions, ends).tolist())


def _half_widths(hits: Numbers, trials: Numbers, alpha: float) -> Numbers:
    low, high = _exact(hits, trials, alpha)
    return (high - low) / 2


def _exact(hits: Numbers, trials: Numbers, alpha: float) -> tuple[Numbers, Numbers]:
    """clopper_pearson for arrays."""

    def low(count: Numbers) -> Numbers:
        return np.where(count > 0, betaincinv(np.maximum(count, 1), trials - count + 1, alpha / 2), 0.0)

    return low(hits), 1 - low(trials - hits)


def _ways_after(ways: Numbers, more: int) -> Numbers:
    """Logarithm of the ways to each number of hits `more` trials later: summed over the hits among those."""
    total = np.full(len(ways) + more, -inf)
    for hits, added in enumerate(_log_choose(more)):
        part = total[hits : hits + len(ways)]
        np.logaddexp(part, ways + added, out=part)
    return total


def _log_choose(trials: int) -> Numbers:
    """Logarithm of the ways to have 0, 1 ... hits."""
    hits = np.arange(trials + 1)
    ways: Numbers = gammaln(trials + 1) - gammaln(hits + 1) - gammaln(trials - hits + 1)
    return ways
