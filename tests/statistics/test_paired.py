"""Paired proportions: McNemar, Tango's interval and equivalence against likelihoods maximised another way."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import binom, norm
from statsmodels.stats.contingency_tables import mcnemar

from flipper.errors import UsageError
from flipper.statistics.intervals import Interval
from flipper.statistics.paired import (
    Pairs,
    equivalence_p,
    equivalent,
    mcnemar_exact,
    paired_difference,
    pooled,
    stratified_difference,
    stratified_equivalent,
    stratified_mcnemar,
)


@st.composite
def tables(draw, most=400):
    pairs = draw(st.integers(1, most))
    only_a = draw(st.integers(0, pairs))
    return only_a, draw(st.integers(0, pairs - only_a)), pairs


@given(tables())
def test_mcnemar_as_in_statsmodels(table):
    only_a, only_b, pairs = table
    theirs = mcnemar([[pairs - only_a - only_b, only_a], [only_b, 0]], exact=True).pvalue
    assert mcnemar_exact(only_a, only_b) == pytest.approx(theirs)


def test_mcnemar_by_hand():
    assert mcnemar_exact(0, 0) == 1
    assert mcnemar_exact(0, 5) == 2 / 32
    assert mcnemar_exact(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert mcnemar_exact(4, 4) == 1


@pytest.mark.parametrize("discordant", [1, 6, 13, 40, 200])
def test_mcnemar_raises_no_more_false_alarms_than_its_level(discordant):
    """The level given any number of discordant pairs, by enumeration."""
    chance = binom.pmf(np.arange(discordant + 1), discordant, 0.5)
    found = np.array([mcnemar_exact(only_a, discordant - only_a) for only_a in range(discordant + 1)])
    for level in (0.001, 0.01, 0.05, 0.1, 0.5):
        assert chance[found <= level].sum() <= level + 1e-12


def test_pairs_are_counted():
    seen = [(True, True)] * 2 + [(True, False)] * 3 + [(False, True)] + [(False, False)] * 5
    counted = Pairs.of(seen)
    assert counted == Pairs(both=2, only_a=3, only_b=1, neither=5)
    assert counted.stratum == (3, 1, 11)
    assert Pairs.of([]).pairs == 0


def score_by_likelihood(only_a, only_b, pairs, difference):
    """Tango's statistic, its nuisance proportion found by maximising the multinomial likelihood numerically."""

    def loss(only_b_share):
        shares = only_b_share + difference, only_b_share, 1 - 2 * only_b_share - difference
        counts = only_a, only_b, pairs - only_a - only_b
        return -sum(n * math.log(max(p, 1e-300)) for n, p in zip(counts, shares, strict=True) if n)

    least, most = max(0.0, -difference), (1 - difference) / 2
    best = minimize_scalar(loss, bounds=(least, most), method="bounded", options={"xatol": 1e-12}).x
    best = min((best, least, most), key=loss)
    return (only_a - only_b - pairs * difference) / math.sqrt(pairs * (2 * best + difference * (1 - difference)))


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("table", [(12, 2, 50), (1, 7, 21), (0, 1, 44), (3, 3, 30), (20, 5, 360), (9, 0, 30)])
def test_the_interval_inverts_the_score_test(table, confidence):
    quantile = norm.ppf((1 + confidence) / 2)
    estimate, found = paired_difference(*table, confidence)
    assert estimate == (table[0] - table[1]) / table[2]
    low = brentq(lambda at: score_by_likelihood(*table, at) - quantile, -0.999, estimate, xtol=1e-10)
    high = brentq(lambda at: score_by_likelihood(*table, at) + quantile, estimate, 0.999, xtol=1e-10)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(
    ("table", "estimate", "low", "high", "p"),
    [((6, 16, 161), -0.0621, -0.1240, -0.0054, 0.0525), ((1, 7, 21), -0.2857, -0.5172, -0.0260, 0.0703)],
)
def test_published_examples(table, estimate, low, high, p):
    """Two studies of stem cells and consolidation therapy, worked by M. W. Fagerland, S. Lydersen, P. Laake,
    Statistical Analysis of Contingency Tables (2017), chapter 8."""
    found, interval = paired_difference(*table)
    assert [round(value, 4) for value in (found, interval.low, interval.high)] == [estimate, low, high]
    assert round(mcnemar_exact(*table[:2]), 4) == p


@pytest.mark.parametrize("pairs", [1, 30, 360])
def test_without_discordant_pairs_the_interval_is_known(pairs):
    reach = norm.ppf(0.975) ** 2 / (pairs + norm.ppf(0.975) ** 2)
    estimate, found = paired_difference(0, 0, pairs)
    assert estimate == 0
    assert (found.low, found.high) == pytest.approx((-reach, reach))


def test_all_pairs_discordant_one_way():
    estimate, found = paired_difference(30, 0, 30)
    assert (estimate, found.high) == (1, 1)
    assert 0 < found.low < 1


def test_no_pairs_say_nothing():
    assert paired_difference(0, 0, 0) == (None, Interval(-1, 1))
    assert mcnemar_exact(0, 0) == 1
    assert equivalence_p(0, 0, 0, 0.5) == 1
    assert not equivalent(0, 0, 0, 0.5)


def all_tables(pairs):
    return [(a, b, pairs) for a in range(pairs + 1) for b in range(pairs + 1 - a)]


def chances(pairs, share_a, share_b):
    """Probability of every table: the discordant pairs are binomial, and so is their split."""
    table = np.array(all_tables(pairs))
    discordant, share = table[:, 0] + table[:, 1], share_a + share_b
    split = binom.pmf(table[:, 0], discordant, share_a / share if share else 0.5)
    return binom.pmf(discordant, pairs, share) * split


SHARES = [
    (discordant * split, discordant * (1 - split))
    for discordant in (0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1)
    for split in (0.5, 0.6, 0.75, 0.9, 1)
]


@pytest.mark.parametrize(("pairs", "least"), [(10, 0.92), (30, 0.92), (60, 0.92)])
def test_the_interval_covers_nearly_what_it_says(pairs, least):
    """Exact coverage over a grid of proportions."""
    found = [paired_difference(*table)[1] for table in all_tables(pairs)]
    low, high = np.array([each.low for each in found]), np.array([each.high for each in found])
    covered = []
    for share_a, share_b in SHARES:
        truth = share_a - share_b
        inside = (low <= truth + 1e-12) & (truth - 1e-12 <= high)
        covered.append(chances(pairs, share_a, share_b)[inside].sum())
    assert min(covered) >= least
    assert np.mean(covered) >= 0.95


@pytest.mark.parametrize(("pairs", "margin"), [(30, 0.2), (60, 0.1)])
def test_equivalence_is_seldom_claimed_at_the_margin(pairs, margin):
    """Exact level where the proportions differ by just the margin, over all shares of discordant pairs."""
    claimed = np.array([equivalent(*table, margin) for table in all_tables(pairs)])
    levels = []
    for extra in np.linspace(0, (1 - margin) / 2, 25):
        levels.append(chances(pairs, margin + extra, extra)[claimed].sum())
    assert max(levels) <= 0.06
    assert claimed.any()


def test_strata_are_summed():
    strata = [(3, 1, 30), (0, 0, 30), (5, 2, 20)]
    assert pooled(strata) == (8, 3, 80)
    assert pooled([]) == (0, 0, 0)
    assert stratified_mcnemar(strata) == mcnemar_exact(8, 3)
    assert stratified_difference(strata, 0.9) == paired_difference(8, 3, 80, 0.9)
    assert stratified_equivalent(strata, 0.3) == equivalent(8, 3, 80, 0.3)
    with pytest.raises(UsageError, match="only_a: 31 is not between 0 and pairs, 30"):
        pooled([(1, 1, 30), (31, 0, 30)])


def test_the_stratified_interval_covers_unlike_strata():
    """By simulation: 12 cells of 30 pairs, some with many discordant pairs and some with none, 4,000 campaigns."""
    shares = np.array([(0, 0), (0.02, 0.01), (0.3, 0.1), (0.5, 0.2)] * 3)
    truth = (shares[:, 0] - shares[:, 1]).mean()
    drawn = np.random.default_rng(7).multinomial(30, np.column_stack([shares, 1 - shares.sum(axis=1)]), (4000, 12))
    covered = [truth in stratified_difference([(int(a), int(b), 30) for a, b, _ in campaign])[1] for campaign in drawn]
    assert 0.95 - 4 * math.sqrt(0.95 * 0.05 / 4000) <= np.mean(covered) < 0.99


@given(tables(), st.floats(0.01, 0.5), st.floats(0.001, 0.4))
def test_equivalence_agrees_with_the_interval(table, margin, alpha):
    found = paired_difference(*table, 1 - 2 * alpha)[1]
    assume(min(abs(found.low + margin), abs(found.high - margin)) > 1e-9)
    assert equivalent(*table, margin, alpha) == (-margin < found.low and found.high < margin)


@given(tables(), st.floats(0.5, 0.999))
def test_swapping_a_and_b_turns_the_sign(table, confidence):
    only_a, only_b, pairs = table
    estimate, found = paired_difference(only_a, only_b, pairs, confidence)
    assert paired_difference(only_b, only_a, pairs, confidence) == (-estimate, Interval(-found.high, -found.low))
    assert -1 <= found.low <= estimate <= found.high <= 1
    assert mcnemar_exact(only_a, only_b) == mcnemar_exact(only_b, only_a)
    assert equivalence_p(only_a, only_b, pairs, 0.1) == equivalence_p(only_b, only_a, pairs, 0.1)


@given(tables(), st.floats(0.1, 0.999), st.floats(0.1, 0.999))
def test_more_confidence_is_wider(table, one, other):
    narrow = paired_difference(*table, min(one, other))[1]
    wide = paired_difference(*table, max(one, other))[1]
    assert wide.low <= narrow.low <= narrow.high <= wide.high


@given(tables(), st.floats(0.01, 0.98), st.floats(0.01, 0.98))
def test_a_wider_margin_is_easier(table, one, other):
    assert equivalence_p(*table, max(one, other)) <= equivalence_p(*table, min(one, other)) + 1e-12


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: paired_difference(3, 0, 2), "only_a: 3 is not between 0 and pairs, 2"),
        (lambda: paired_difference(1, 2, 2), "only_b: 2 is not between 0 and pairs less only_a, 1"),
        (lambda: mcnemar_exact(-1, 2), "only_a: -1 is not between 0 and pairs, 1"),
        (lambda: equivalent(1, 1, 5, 1.5), "margin: 1.5 is not between 0 and 1"),
        (lambda: equivalent(1, 1, 5, 0.1, 0.5), "confidence: 0.0 is not between 0 and 1"),
        (lambda: paired_difference(1, 1, 5, 95), "confidence: 95 is not between 0 and 1"),
    ],
)
def test_impossible_numbers_are_refused(call, said):
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value) == said
