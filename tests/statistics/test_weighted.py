"""Re-weighted proportions: unbiased under uneven draws, and intervals that hold what they say."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom
from statsmodels.stats.weightstats import DescrStatsW

from flipper.errors import UsageError
from flipper.statistics.intervals import Interval, clopper_pearson, wilson
from flipper.statistics.weighted import post_stratified, weighted_proportion

DRAWS = {
    "even": ([0.5, 0.5], [0.5, 0.5], [0.1, 0.1]),
    "a tiny layer as often as a big one": ([0.001, 0.999], [0.5, 0.5], [0.3, 0.05]),
    "layers alike": ([0.05, 0.15, 0.8], [1 / 3] * 3, [0.2, 0.2, 0.2]),
    "small layers worse": ([0.05, 0.15, 0.8], [1 / 3] * 3, [0.6, 0.3, 0.02]),
    "the big layer worse": ([0.05, 0.15, 0.8], [1 / 3] * 3, [0.02, 0.1, 0.5]),
    "fields": ([1 / 32, 8 / 32, 23 / 32], [1 / 3] * 3, [0.2, 0.3, 0.001]),
    "most of the population seldom drawn": ([0.9, 0.1], [0.05, 0.95], [0.05, 0.5]),
}
"""Shares of the population, probabilities of the draw, probabilities of harm."""


def campaigns(draw, trials, number, seed=4):
    """Simulated: the stratum of each trial and whether it was harmful."""
    _, probabilities, harm = map(np.array, draw)
    rng = np.random.default_rng(seed)
    strata = rng.choice(len(harm), (number, trials), p=probabilities)
    return strata, rng.random((number, trials)) < harm[strata]


@pytest.mark.parametrize("name", DRAWS)
def test_estimates_are_right_on_average_where_plain_counting_is_not(name):
    shares, probabilities, harm = map(np.array, DRAWS[name])
    truth, weights = shares @ harm, shares / probabilities
    strata, hits = campaigns(DRAWS[name], 400, 300)
    estimates = [weighted_proportion(h, weights[s])[0] for s, h in zip(strata, hits, strict=True)]
    assert abs(np.mean(estimates) - truth) < 4 * np.std(estimates) / np.sqrt(300) + 0.003
    plain = hits.mean()
    assert abs(plain - truth) < 0.01 or abs(np.mean(estimates) - truth) < abs(plain - truth) / 5


@pytest.mark.parametrize("trials", [30, 100])
@pytest.mark.parametrize("name", DRAWS)
def test_simulated_coverage_under_uneven_draws(name, trials):
    shares, probabilities, harm = map(np.array, DRAWS[name])
    truth, weights, number = shares @ harm, shares / probabilities, 600
    by_weight = by_stratum = 0
    for strata, hits in zip(*campaigns(DRAWS[name], trials, number), strict=True):
        by_weight += truth in weighted_proportion(hits, weights[strata])[1]
        counts = [(share, int(hits[strata == k].sum()), int((strata == k).sum())) for k, share in enumerate(shares)]
        by_stratum += truth in post_stratified(counts)[1]
    error = 4 * np.sqrt(0.95 * 0.05 / number)
    assert by_weight / number >= 0.95 - error
    assert by_stratum / number >= 0.925 - error


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.1, 0.9), (0.7, 0.3)])
def test_exact_coverage_of_two_strata(shares):
    """Over all outcomes of 12 and 25 trials, for a grid of proportions: 95 % on average, seldom much below."""
    found = {
        (a, b): post_stratified([(shares[0], a, 12), (shares[1], b, 25)])[1]
        for a, b in itertools.product(range(13), range(26))
    }
    covered = []
    for one, other in itertools.product(np.linspace(0.02, 0.98, 13), repeat=2):
        truth = shares[0] * one + shares[1] * other
        chance = binom.pmf(np.arange(13), 12, one)[:, None] * binom.pmf(np.arange(26), 25, other)
        covered.append(sum(chance[table] for table, interval in found.items() if truth in interval))
    assert np.mean(covered) >= 0.945
    assert min(covered) >= 0.88


trial_lists = st.lists(st.tuples(st.booleans(), st.floats(0.01, 100)), min_size=1, max_size=60)


@given(trial_lists)
def test_statsmodels_finds_the_same_estimate(trials):
    hits, weights = zip(*trials, strict=True)
    assert weighted_proportion(hits, weights)[0] == pytest.approx(DescrStatsW(np.array(hits), weights).mean)


@given(trial_lists, st.floats(0.5, 0.99), st.floats(0.5, 0.99))
def test_properties_of_weights(trials, one, other):
    """The estimate lies inside, misses mirror hits, more confidence is wider."""
    hits, weights = map(list, zip(*trials, strict=True))
    estimate, wide = weighted_proportion(hits, weights, max(one, other))
    _, narrow = weighted_proportion(hits, weights, min(one, other))
    assert 0 <= wide.low <= narrow.low <= estimate + 1e-12
    assert estimate - 1e-12 <= narrow.high <= wide.high <= 1
    mirrored = weighted_proportion([not hit for hit in hits], weights, max(one, other))[1]
    assert (wide.low, wide.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low), abs=1e-6)


@given(st.integers(0, 50), st.integers(0, 50))
def test_equal_weights_are_the_plain_proportion(hit, missed):
    estimate, found = weighted_proportion([True] * hit + [False] * missed, [1.0] * (hit + missed))
    if hit + missed:
        assert estimate == pytest.approx(hit / (hit + missed))
    exact = clopper_pearson(hit, hit + missed)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_kish_by_hand():
    """No hits, weights 1, 1 and 4: (6)^2 / 18 = 2 effective trials."""
    estimate, found = weighted_proportion([False] * 3, [1, 1, 4])
    assert estimate == 0
    assert (found.low, found.high) == (0, pytest.approx(1 - 0.025 ** (1 / 2)))


def test_the_linearised_variance_by_hand():
    """One heavy hit: p = 5/14, variance (25 (9/14)^2 + 9 (5/14)^2) / 14^2, which is 3.92 trials where Kish has 5.76."""
    estimate, found = weighted_proportion([True] + [False] * 9, [5] + [1] * 9)
    variance = (25 * (9 / 14) ** 2 + 9 * (5 / 14) ** 2) / 14**2
    effective = 5 / 14 * 9 / 14 / variance
    assert estimate == pytest.approx(5 / 14)
    assert found.low == pytest.approx(beta.ppf(0.025, 5 / 14 * effective, 9 / 14 * effective + 1))
    assert found.high == pytest.approx(beta.ppf(0.975, 5 / 14 * effective + 1, 9 / 14 * effective))


def test_unseen_weight_widens():
    """Trials of mean weight 0.1: nine tenths of the population were never drawn."""
    hits = [True] * 5 + [False] * 25
    assert weighted_proportion(hits, [0.1] * 30)[1].half_width > 2 * weighted_proportion(hits, [1.0] * 30)[1].half_width


def test_one_stratum_is_wilson():
    estimate, found = post_stratified([(1.0, 3, 30)])
    assert estimate == 0.1
    assert (found.low, found.high) == pytest.approx((wilson(3, 30).low, wilson(3, 30).high))


def test_strata_by_hand():
    estimate, _ = post_stratified([(0.25, 1, 2), (0.75, 1, 10)])
    assert estimate == pytest.approx(0.25 * 0.5 + 0.75 * 0.1)


def test_a_stratum_without_trials_may_be_anything():
    estimate, found = post_stratified([(0.6, 0, 50), (0.4, 0, 0)])
    assert estimate == 0
    assert found.low == 0
    assert found.high >= 0.4


def test_no_trials_say_nothing():
    assert weighted_proportion([], []) == (None, Interval(0, 1))
    assert post_stratified([(0.5, 0, 0), (0.5, 0, 0)]) == (None, Interval(0, 1))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: weighted_proportion([True], [1, 2]), "weights: 2 for 1 trials"),
        (lambda: weighted_proportion([True], [0]), "weights: one is not a positive finite number"),
        (lambda: weighted_proportion([True], [float("nan")]), "weights: one is not a positive finite number"),
        (lambda: post_stratified([(0.5, 1, 2)]), "shares: they sum to 0.5, not to 1"),
        (lambda: post_stratified([(1, 3, 2)]), "hits: 3 is not between 0 and trials, 2"),
        (lambda: post_stratified([(2, 1, 2), (-1, 1, 2)]), "share: 2 is not between 0 and certainty, 1"),
        (lambda: post_stratified([(1, 1, 2)], 2), "confidence: 2 is not between 0 and 1"),
    ],
)
def test_impossible_numbers_are_refused(call, said):
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value) == said
