"""Clustered pairs: against all signs and all exchanges one by one, and coverage and levels by simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flipper.errors import UsageError
from flipper.statistics.clusters import (
    clustered_difference,
    clustered_equivalence_p,
    clustered_equivalent,
    design_effect,
    exchange_exact,
    sign_flip_exact,
)
from flipper.statistics.intervals import Interval
from flipper.statistics.paired import mcnemar_exact, paired_difference, pooled, stratified_difference


@st.composite
def clusters(draw, most=12):
    def one():
        only_a, only_b, other = (draw(st.integers(0, 4)) for _ in range(3))
        return only_a, only_b, only_a + only_b + other

    return [one() for _ in range(draw(st.integers(0, most)))]


@given(clusters(10))
def test_all_signs_one_by_one(drawn):
    differences = [only_a - only_b for only_a, only_b, _ in drawn]
    signs = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(sign, differences, strict=True))) for sign in signs]
    expected = np.mean([each >= abs(sum(differences)) for each in sums])
    assert sign_flip_exact(drawn) == pytest.approx(expected)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 20))
def test_clusters_of_one_pair_are_mcnemar(only_a, only_b, same):
    single = [(1, 0, 1)] * only_a + [(0, 1, 1)] * only_b + [(0, 0, 1)] * same
    assert sign_flip_exact(single) == pytest.approx(mcnemar_exact(only_a, only_b))
    layouts = [([int(a)], [int(b)]) for a, b, _ in single]
    assert exchange_exact(layouts) == pytest.approx(mcnemar_exact(only_a, only_b))


groups = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=2, max_size=2), st.lists(st.integers(0, 3), min_size=1, max_size=1)),
    max_size=6,
)


@given(groups)
def test_all_exchanges_one_by_one(drawn):
    """Two layouts against one: which of the three is the one, in every cluster."""
    everyone = [[*group_a, *group_b] for group_a, group_b in drawn]
    sums = []
    for alone in itertools.product(range(3), repeat=len(drawn)):
        means = [(sum(x) - x[k]) / 2 - x[k] for x, k in zip(everyone, alone, strict=True)]
        sums.append(abs(sum(means)))
    seen = abs(sum(sum(group_a) / 2 - group_b[0] for group_a, group_b in drawn))
    assert exchange_exact(drawn) == pytest.approx(np.mean(np.array(sums) >= seen - 1e-9))


def test_exact_tests_by_hand():
    assert sign_flip_exact([(3, 0, 3), (1, 0, 2), (1, 0, 1)]) == 2 / 8
    assert sign_flip_exact([(3, 0, 3), (1, 0, 2), (0, 1, 1)]) == 6 / 8
    assert sign_flip_exact([]) == 1
    assert exchange_exact([([1, 1], [0])] * 2) == 1 / 9, "means 1, or 1/2 below the other: both clusters at 1"


def test_design_effect_by_hand():
    """Four clusters of two like pairs: the variance by clusters is 2 x 4 / 3 of the one by pairs."""
    alike = [(2, 0, 2), (0, 2, 2), (2, 0, 2), (0, 2, 2)]
    assert design_effect(alike) == pytest.approx((4 * 4 * 4 / 3) / 8)
    assert design_effect([(1, 1, 2)] * 4) == 1, "pairs that balance within clusters are not counted as more"
    assert design_effect([(0, 0, 2)] * 3 + [(0, 0, 6)]) == pytest.approx((3 * 4 + 36) / 12), "can't be seen"
    assert design_effect([]) == 1


def nested(rng, number, size, share_a, share_b, alike):
    """Clusters whose pairs copy the cluster's own outcome with probability `alike`, as doses of one draw may."""
    own = np.where(rng.random((number, size)) < alike, rng.random((number, 1)), rng.random((number, size)))
    only_a, only_b = own < share_a, (own >= share_a) & (own < share_a + share_b)
    return [(int(a), int(b), size) for a, b in zip(only_a.sum(axis=1), only_b.sum(axis=1), strict=True)]


SCENES = [(90, 4, 0.1, 0.05, 0.5), (90, 4, 0.02, 0.02, 0.9), (30, 4, 0.1, 0.05, 0.7), (10, 12, 0.1, 0.05, 0.5)]
CAMPAIGNS = 500


@pytest.mark.parametrize("scene", [*SCENES, (90, 4, 0.1, 0.1, 0.0), (3, 120, 0.1, 0.05, 0.05)])
def test_simulated_coverage_under_clustering(scene):
    rng = np.random.default_rng(8)
    drawn = [nested(rng, *scene) for _ in range(CAMPAIGNS)]
    covered = np.mean([scene[2] - scene[3] in clustered_difference(each)[1] for each in drawn])
    assert covered >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / CAMPAIGNS)


@pytest.mark.parametrize("scene", SCENES)
def test_taking_the_pairs_for_independent_promises_too_much(scene):
    rng = np.random.default_rng(8)
    drawn = [nested(rng, *scene) for _ in range(CAMPAIGNS)]
    assert np.mean([scene[2] - scene[3] in stratified_difference(each)[1] for each in drawn]) < 0.9


@pytest.mark.parametrize("alike", [0, 0.5, 0.95])
def test_simulated_level_of_the_sign_flip_test(alike):
    rng = np.random.default_rng(9)
    alarms = np.mean([sign_flip_exact(nested(rng, 40, 4, 0.1, 0.1, alike)) <= 0.05 for _ in range(CAMPAIGNS)])
    assert alarms <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / CAMPAIGNS)


def test_simulated_level_of_the_exchange_test():
    """Three layouts against two, all alike but correlated within a draw."""
    rng = np.random.default_rng(10)
    alarms = 0
    for _ in range(CAMPAIGNS):
        hits = rng.binomial(4, rng.choice([0.0, 0.1, 0.8], (40, 1)), (40, 5))
        alarms += exchange_exact([(row[:3], row[3:]) for row in hits.tolist()]) <= 0.05
    assert alarms / CAMPAIGNS <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / CAMPAIGNS)


@given(clusters(), st.floats(0.01, 0.6), st.floats(0.005, 0.4))
def test_equivalence_agrees_with_the_interval(drawn, margin, alpha):
    found = clustered_difference(drawn, 1 - 2 * alpha)[1]
    assume(min(abs(found.low + margin), abs(found.high - margin)) > 1e-7)
    assert clustered_equivalent(drawn, margin, alpha) == (-margin < found.low and found.high < margin)


@given(clusters(), st.floats(0.5, 0.99), st.floats(0.5, 0.99))
def test_properties(drawn, one, other):
    """Swapped sides turn the sign, order does not matter, more confidence is wider, clusters are never narrower."""
    estimate, wide = clustered_difference(drawn, max(one, other))
    _, narrow = clustered_difference(drawn, min(one, other))
    assert wide.low <= narrow.low <= narrow.high <= wide.high
    swapped = [(only_b, only_a, pairs) for only_a, only_b, pairs in drawn[::-1]]
    turned, mirrored = clustered_difference(swapped, max(one, other))
    assert (wide.low, wide.high) == pytest.approx((-mirrored.high, -mirrored.low))
    assert sign_flip_exact(swapped) == pytest.approx(sign_flip_exact(drawn))
    if estimate is not None:
        assert turned == pytest.approx(-estimate)
        assert wide.low - 1e-12 <= estimate <= wide.high + 1e-12
        independent = paired_difference(*pooled(drawn), max(one, other))[1]
        assert wide.low <= independent.low + 1e-12
        assert independent.high - 1e-12 <= wide.high


def test_fewer_than_two_clusters_say_nothing():
    assert clustered_difference([]) == (None, Interval(-1, 1))
    assert clustered_difference([(3, 1, 8), (0, 0, 0)]) == (0.25, Interval(-1, 1))
    assert clustered_equivalence_p([(0, 0, 1000)], 0.5) == 1


def test_no_discordant_pair_counts_clusters_and_not_pairs():
    one_each = clustered_difference([(0, 0, 1)] * 90)[1]
    assert clustered_difference([(0, 0, 4)] * 90)[1].high == pytest.approx(one_each.high)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sign_flip_exact([(3, 0, 2)]), "only_a: 3 is not between 0 and pairs, 2"),
        (lambda: clustered_difference([(1, 2, 2), (0, 0, 1)]), "only_b: 2 is not between 0 and pairs less only_a, 1"),
        (lambda: clustered_equivalent([(1, 0, 2)], 0), "margin: 0 is not between 0 and 1"),
        (lambda: exchange_exact([([1], [])]), "groups: one is empty; both need a layout to compare"),
    ],
)
def test_impossible_numbers_are_refused(call, said):
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value) == said
