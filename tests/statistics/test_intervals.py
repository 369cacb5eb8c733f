"""Intervals for one proportion: against statsmodels and scipy, by exact enumeration, and as properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, hypergeom
from statsmodels.stats.proportion import proportion_confint

from flipper.errors import UsageError
from flipper.statistics.intervals import (
    Interval,
    all_events_limit,
    census,
    clopper_pearson,
    finite_population,
    wilson,
    zero_events_limit,
)  # fmt: skip

CONFIDENCES = [0.5, 0.9, 0.95, 0.99, 0.999]
COUNTS = [(0, 1), (1, 1), (0, 30), (1, 30), (15, 30), (29, 30), (30, 30), (7, 384), (384, 384), (3, 100_000)]


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize(("count", "trials"), COUNTS)
@pytest.mark.parametrize(("interval", "theirs"), [(wilson, "wilson"), (clopper_pearson, "beta")])
def test_statsmodels_finds_the_same(interval, theirs, count, trials, confidence):
    low, high = proportion_confint(count, trials, alpha=1 - confidence, method=theirs)
    found = interval(count, trials, confidence)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize(("count", "trials"), COUNTS)
@pytest.mark.parametrize(("interval", "theirs"), [(wilson, "wilson"), (clopper_pearson, "exact")])
def test_scipy_finds_the_same(interval, theirs, count, trials):
    reference = binomtest(count, trials).proportion_ci(0.95, method=theirs)
    found = interval(count, trials)
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high), abs=1e-9)


@pytest.mark.parametrize(
    ("count", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_published_wilson_intervals(count, trials, low, high):
    """R. G. Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3."""
    found = wilson(count, trials)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@pytest.mark.parametrize(
    ("count", "trials", "low", "high"),
    [(81, 263, 0.2527, 0.3676), (15, 148, 0.0578, 0.1617), (0, 20, 0.0, 0.1684), (1, 29, 0.0009, 0.1776)],
)
def test_published_exact_intervals(count, trials, low, high):
    """The same table, method 5."""
    found = clopper_pearson(count, trials)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


def coverage(interval, trials, proportions, confidence):
    """The probability of containing each proportion, summed over all outcomes."""
    found = [interval(count, trials, confidence) for count in range(trials + 1)]
    low, high = (np.array([[getattr(each, end)] for each in found]) for end in ("low", "high"))
    chance = binom.pmf(np.arange(trials + 1)[:, None], trials, proportions)
    return (chance * ((low <= proportions) & (proportions <= high))).sum(axis=0)


PROPORTIONS = np.linspace(0.0025, 0.9975, 399)


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("trials", [1, 2, 5, 30, 384])
def test_the_exact_interval_never_covers_less_than_it_says(trials, confidence):
    assert coverage(clopper_pearson, trials, PROPORTIONS, confidence).min() >= confidence - 1e-12


@pytest.mark.parametrize("trials", [10, 30, 90, 384])
def test_wilson_covers_what_it_says_on_average(trials):
    covered = coverage(wilson, trials, PROPORTIONS, 0.95)
    assert covered.mean() == pytest.approx(0.95, abs=0.006)
    assert covered.min() >= 0.83


@pytest.mark.parametrize("interval", [wilson, clopper_pearson])
def test_no_trials_say_nothing(interval):
    assert interval(0, 0) == Interval(0, 1)


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("trials", [1, 3, 30, 10**6])
def test_the_limit_for_zero_events_is_exact(trials, confidence):
    limit = zero_events_limit(trials, confidence)
    assert binom.cdf(0, trials, limit) == pytest.approx(1 - confidence)
    assert limit == pytest.approx(clopper_pearson(0, trials, 2 * confidence - 1).high if confidence > 0.5 else limit)
    assert binom.sf(trials - 1, trials, all_events_limit(trials, confidence)) == pytest.approx(1 - confidence)


@pytest.mark.parametrize("trials", [100, 1000, 10**6])
def test_the_rule_of_three(trials):
    assert zero_events_limit(trials) == pytest.approx(3 / trials, rel=0.02)


def test_no_events_among_no_trials():
    assert (zero_events_limit(0), all_events_limit(0)) == (1, 0)


def test_a_census_has_no_sampling_error():
    assert census(3, 8) == Interval(0.375, 0.375)
    assert census(0, 8) == Interval(0, 0)
    assert census(0, 0) == Interval(0, 1)
    assert census(3, 8).half_width == 0


@pytest.mark.parametrize(("population", "trials"), [(1, 1), (12, 5), (40, 40), (60, 17), (200, 90)])
def test_sampling_without_replacement_covers_what_it_says(population, trials):
    """For every number of hits in the population, over all samples; and no bound could be one hit tighter."""
    found = [finite_population(count, trials, population, 0.9) for count in range(trials + 1)]
    for hits in range(population + 1):
        chance = hypergeom.pmf(np.arange(trials + 1), population, hits, trials)
        inside = np.array([hits / population in Interval(x.low - 1e-12, x.high + 1e-12) for x in found])
        assert chance[inside].sum() >= 0.9 - 1e-12
    for count, interval in enumerate(found):
        low, high = round(interval.low * population), round(interval.high * population)
        assert hypergeom.sf(count - 1, population, low, trials) > 0.05
        assert hypergeom.cdf(count, population, high, trials) > 0.05
        assert low == count or hypergeom.sf(count - 1, population, low - 1, trials) <= 0.05
        assert high == population - trials + count or hypergeom.cdf(count, population, high + 1, trials) <= 0.05


def test_a_finite_population_lies_between_a_census_and_an_endless_one():
    assert finite_population(3, 8, 8) == census(3, 8)
    assert finite_population(0, 8, 8) == Interval(0, 0)
    assert finite_population(0, 0, 8) == finite_population(0, 0, 0) == Interval(0, 1)
    endless, found = clopper_pearson(7, 384), finite_population(7, 384, 10**10)
    assert (found.low, found.high) == pytest.approx((endless.low, endless.high), rel=1e-4)
    widths = [finite_population(7, 384, population).half_width for population in (384, 500, 1000, 10**5, 10**8)]
    assert widths == sorted(widths)


@pytest.mark.parametrize("interval", [wilson, clopper_pearson])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3, 2), "count: 3 is not between 0 and trials, 2"),
        ((-1, 2), "count: -1 is not between 0 and trials, 2"),
        ((math.nan, 2), "count: nan is not between 0 and trials, 2"),
        ((0, -1), "count: 0 is not between 0 and trials, -1"),
        ((1, 2, 1.0), "confidence: 1.0 is not between 0 and 1"),
        ((1, 2, 0.0), "confidence: 0.0 is not between 0 and 1"),
    ],
)
def test_impossible_numbers_are_refused(interval, arguments, said):
    with pytest.raises(UsageError) as caught:
        interval(*arguments)
    assert str(caught.value) == said


def test_impossible_limits_are_refused():
    for call in (lambda: zero_events_limit(-1), lambda: zero_events_limit(3, 1), lambda: census(9, 8)):
        with pytest.raises(UsageError):
            call()
    with pytest.raises(UsageError, match="trials: 9 is not between 0 and population, 8"):
        finite_population(1, 9, 8)


counted = st.integers(1, 2000).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials)))
confidences = st.floats(0.01, 0.9999)


@given(counted, confidences)
def test_bounds_hold_the_proportion_and_mirror_with_the_misses(counts, confidence):
    count, trials = counts
    for interval in (wilson, clopper_pearson):
        found, mirrored = interval(count, trials, confidence), interval(trials - count, trials, confidence)
        assert 0 <= found.low <= count / trials + 1e-12
        assert count / trials - 1e-12 <= found.high <= 1
        assert (found.low, found.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low), abs=1e-12)
        assert (found.low == 0) == (count == 0)
        assert (found.high == 1) == (count == trials)


@given(counted, confidences, confidences)
def test_more_confidence_is_wider(counts, one, other):
    for interval in (wilson, clopper_pearson):
        narrow, wide = interval(*counts, min(one, other)), interval(*counts, max(one, other))
        assert wide.low <= narrow.low + 1e-12
        assert narrow.high <= wide.high + 1e-12


@given(counted, confidences)
def test_more_hits_move_both_bounds_up(counts, confidence):
    count, trials = counts
    for interval in (wilson, clopper_pearson):
        fewer, more = interval(max(count - 1, 0), trials, confidence), interval(count, trials, confidence)
        assert fewer.low <= more.low
        assert fewer.high <= more.high
