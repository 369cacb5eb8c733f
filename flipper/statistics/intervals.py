"""Intervals for the proportion of trials that had an outcome."""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, log, sqrt

from flipper.statistics.ranges import check_confidence, check_share, two_sided


@dataclass(frozen=True, slots=True)
class Interval:
    """A lower and an upper bound, both included."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance between the bounds."""
        return (self.high - self.low) / 2

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def wilson(count: float, trials: float, confidence: float = 0.95) -> Interval:
    """Two-sided Wilson score interval for a binomial proportion: close to its confidence on average over proportions.

    count, trials: 0 <= count <= trials; fractions are allowed, for effective numbers of trials.
    Both bounds are in [0, 1]; (0, 1) when trials is 0. Raises UsageError for values outside their ranges.
    Source: E. B. Wilson, JASA 22 (1927) 209-212.
    """
    quantile = two_sided(confidence)
    check_share("count", count, "trials", trials)
    if trials == 0:
        return Interval(0.0, 1.0)
    return Interval(_wilson_low(count, trials, quantile), 1 - _wilson_low(trials - count, trials, quantile))


def _wilson_low(count: float, trials: float, quantile: float) -> float:
    """The lower bound; the upper one is that of the misses, mirrored. At 0 hits the difference is exactly 0."""
    root = quantile * sqrt(quantile**2 / 4 + count * (trials - count) / trials)
    return max(0.0, (count + quantile**2 / 2 - root) / (trials + quantile**2)) if count else 0.0


def clopper_pearson(count: float, trials: float, confidence: float = 0.95) -> Interval:
    """Two-sided exact interval for a binomial proportion: never below its confidence, whatever the proportion.

    count, trials: 0 <= count <= trials; fractions are allowed, for effective numbers of trials.
    Both bounds are in [0, 1]; (0, 1) when trials is 0. Raises UsageError for values outside their ranges.
    Source: C. J. Clopper and E. S. Pearson, Biometrika 26 (1934) 404-413, by quantiles of the beta distribution.
    """
    check_confidence(confidence)
    check_share("count", count, "trials", trials)
    tail = (1 - confidence) / 2
    return Interval(_exact_low(count, trials, tail), 1 - _exact_low(trials - count, trials, tail))


def _exact_low(count: float, trials: float, tail: float) -> float:
    """The proportion at which `count` hits or more have probability `tail`; 0 where none were hit."""
    from scipy.special import betaincinv

    return float(betaincinv(count, trials - count + 1, tail)) if count else 0.0


def census(count: int, population: int) -> Interval:
    """The proportion itself, twice: where every possible fault was injected there is no sampling error.

    (0, 1) when the population is empty. Raises UsageError unless 0 <= count <= population.
    """
    check_share("count", count, "population", population)
    return Interval(count / population, count / population) if population else Interval(0.0, 1.0)


def finite_population(count: int, trials: int, population: int, confidence: float = 0.95) -> Interval:
    """Two-sided exact interval for the proportion in a population of which `trials` were drawn without replacement.

    clopper_pearson's counterpart by the hypergeometric distribution: narrower, and the proportion itself where all
    were injected. The bounds are multiples of 1 / population; (0, 1) when trials is 0. It takes a random sample: not
    the first trials of an ordered census, nor trials that each draw from the whole population again.
    Raises UsageError unless 0 <= count <= trials <= population.
    Source: J. P. Buonaccorsi, The American Statistician 41 (1987) 215-218.
    """
    check_confidence(confidence)
    check_share("trials", trials, "population", population)
    check_share("count", count, "trials", trials)
    if trials == 0:
        return Interval(0.0, 1.0)
    tail = (1 - confidence) / 2
    fewest = _fewest_hits(count, trials, population, tail)
    return Interval(fewest / population, 1 - _fewest_hits(trials - count, trials, population, tail) / population)


def _fewest_hits(count: int, trials: int, population: int, tail: float) -> int:
    """The fewest hits in the population with which `count` or more are drawn with more than `tail` probability."""
    from scipy.stats import hypergeom

    too_few, enough = count - 1, population - (trials - count)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if hypergeom.sf(count - 1, population, middle, trials) > tail:
            enough = middle
        else:
            too_few = middle
    return enough


def zero_events_limit(trials: int, confidence: float = 0.95) -> float:
    """The largest proportion that is still credible when none of the trials had the event, one-sided and exact.

    1 - (1 - confidence)^(1/trials); at 95 % close to 3 / trials, the rule of three. 1 when trials is 0.
    Source: J. A. Hanley and A. Lippman-Hand, JAMA 249 (1983) 1743-1745.
    """
    check_confidence(confidence)
    check_share("trials", trials, "infinity", float("inf"))
    return -expm1(log(1 - confidence) / trials) if trials else 1.0


def all_events_limit(trials: int, confidence: float = 0.95) -> float:
    """The smallest proportion that is still credible when all of the trials had the event: the same rule, mirrored."""
    return 1 - zero_events_limit(trials, confidence)
