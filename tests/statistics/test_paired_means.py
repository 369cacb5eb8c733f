"""Means with intervals, and the test by signs: against scipy, and their levels by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flipper.errors import UsageError
from flipper.statistics.paired_means import mean_of, sign_flip


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_the_interval_is_students(confidence: float) -> None:
    values = np.random.default_rng(3).normal(size=12).tolist()
    found = mean_of(values, confidence)
    low, high = stats.t.interval(confidence, 11, loc=np.mean(values), scale=stats.sem(values))
    assert found.interval is not None
    assert (found.count, found.mean) == (12, pytest.approx(np.mean(values)))
    assert (found.interval.low, found.interval.high) == (pytest.approx(low), pytest.approx(high))


def test_few_values_have_no_interval() -> None:
    assert (mean_of([]).mean, mean_of([]).interval) == (None, None)
    assert (mean_of([2.5]).mean, mean_of([2.5]).interval) == (2.5, None)
    with pytest.raises(UsageError):
        mean_of([1.0, 2.0], 1.5)


@pytest.mark.parametrize("count", [2, 3, 8, 12])
def test_few_signs_are_all_tried(count: int) -> None:
    values = np.random.default_rng(count).normal(0.4, size=count)
    expected = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    ).pvalue
    assert sign_flip(values.tolist()) == pytest.approx(min(1.0, float(expected)))


def test_many_signs_are_sampled_alike_each_time() -> None:
    values = np.random.default_rng(9).normal(0.5, size=30).tolist()
    found = sign_flip(values)
    assert found == sign_flip(values)
    expected = stats.ttest_1samp(values, 0).pvalue  # near it for so many
    assert found == pytest.approx(float(expected), rel=0.35)
    assert sign_flip([5.0] * 40) == pytest.approx(1e-5)  # the least that the sample can show


def test_no_difference_and_ties() -> None:
    assert sign_flip([]) == 1.0
    assert sign_flip([0.0, 0.0]) == 1.0
    assert sign_flip([0.1, 0.0, 0.1, 0.1]) == 0.25  # 2 of 8 signs are as far; rounding hides none
    assert sign_flip([0.1, -0.1, 0.3]) == 0.75


@pytest.mark.parametrize("count", [10, 25])
def test_the_test_keeps_its_level_and_the_interval_its_coverage(count: int) -> None:
    """Of symmetric differences that are mostly 0, as those of accuracy are."""
    chance, runs = np.random.default_rng(1), 400
    rejected = covered = 0
    for run in range(runs):
        values = (chance.integers(-2, 3, count) * (chance.random(count) < 0.7)).astype(float).tolist()
        if count <= 16 or run % 8 == 0:  # sampled signs take long
            rejected += sign_flip(values) <= 0.05
        interval = mean_of(values).interval
        covered += interval is not None and interval.low <= 0 <= interval.high
    tried = runs if count <= 16 else runs // 8
    assert rejected <= stats.binom.ppf(0.999, tried, 0.05)
    assert covered >= stats.binom.ppf(0.001, runs, 0.93)
