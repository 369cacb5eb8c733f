"""Quantiles: against numpy and scipy, and coverage by simulation and by enumeration."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, quantile_test

from flipper.errors import UsageError
from flipper.statistics.intervals import Interval
from flipper.statistics.quantiles import median, quantile

shares = st.floats(0.05, 0.95)
some = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(some, shares)
def test_numpy_finds_the_same_quantile(values, share):
    assert quantile(values, share)[0] == pytest.approx(np.quantile(values, share), abs=1e-6)


@pytest.mark.parametrize("number", [6, 20, 101])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_scipy_finds_the_same_interval_or_one_value_wider(number, share):
    """scipy's test counts its upper rank from the lower tail, which for discrete ranks may stop one value earlier."""
    values = np.random.default_rng(number).normal(size=number)
    ordered = np.sort(values).tolist()
    theirs = quantile_test(values, q=0, p=share).confidence_interval(0.95)
    _, found = quantile(values.tolist(), share)
    if found is None:
        assert math.isnan(theirs.low) or math.isnan(theirs.high)
        return
    assert found.low == theirs.low
    assert ordered.index(found.high) - ordered.index(theirs.high) in (0, 1)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("number", [6, 29, 90])
def test_coverage_is_exact_and_no_rank_is_wasted(number, share):
    """For a continuous distribution, by the binomial: each tail within its half, and one rank closer outside it."""
    _, found = quantile(list(range(1, number + 1)), share, 0.9)
    if found is None:
        assert binom.cdf(0, number, share) > 0.05 or binom.sf(number - 1, number, share) > 0.05
        return
    low, high = int(found.low), int(found.high)
    assert binom.cdf(low - 1, number, share) <= 0.05 < binom.cdf(low, number, share)
    assert binom.sf(high - 1, number, share) <= 0.05 < binom.sf(high - 2, number, share)


def test_the_median_of_skewed_values_is_covered():
    drawn = np.random.default_rng(3).exponential(size=(2000, 25))
    covered = np.mean([math.log(2) in median(row.tolist())[1] for row in drawn])
    assert covered > 0.95 - 4 * np.sqrt(0.95 * 0.05 / 2000)


def test_too_few_values_give_no_interval():
    assert median([1, 2, 3, 4, 5]) == (3, None)
    assert median([1, 2, 3, 4, 5, 6]) == (3.5, Interval(1, 6))
    assert median([]) == (None, None)
    assert median([7]) == (7, None)


def test_values_may_be_infinite():
    """As with trials that never recovered."""
    estimate, found = median([1.0, 2.0] + [math.inf] * 8)
    assert estimate == math.inf
    assert found.high == math.inf


@given(some, shares, st.floats(0.1, 0.99), st.floats(0.1, 0.99))
def test_more_confidence_is_wider_and_order_does_not_matter(values, share, one, other):
    _, narrow = quantile(values, share, min(one, other))
    _, wide = quantile(values[::-1], share, max(one, other))
    if wide is not None:
        assert wide.low <= narrow.low <= narrow.high <= wide.high


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: median([1, math.nan]), "values: one is not a number"),
        (lambda: quantile([1, 2], 1), "share: 1 is not between 0 and 1"),
        (lambda: median([1, 2], 0), "confidence: 0 is not between 0 and 1"),
    ],
)
def test_impossible_numbers_are_refused(call, said):
    with pytest.raises(UsageError, match=said):
        call()
