"""Faults dealt to groups by weight among those with room, against a sequence made one by one."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import islice
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_draw import Words, chi_square, group_sequence

from flipper.errors import TooFewBits, UsageError
from flipper.faults import sampling
from flipper.faults.sampling import allocate
from flipper.faults.stream import Stream

SEEDS = st.integers(0, 2**64 - 1)
GROUPS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=12)


@pytest.mark.parametrize("batch", [1, 4, 1 << 18])
@settings(max_examples=60)
@given(seed=SEEDS, groups=GROUPS, share=st.floats(0, 1))
def test_counts_are_those_of_one_fault_after_the_other(batch, seed, groups, share):
    capacities = [capacity for capacity, _ in groups]
    weights = [weight for _, weight in groups]
    n = int(share * sum(capacity for capacity, weight in groups if weight))
    common = gcd(*weights) or 1
    words = Words(seed, "groups")
    sequence = list(islice(group_sequence(words, capacities, [w // common for w in weights]), n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_BATCH", batch)
        stream = Stream(seed, "groups")
        counts = allocate(stream, capacities, n, weights)
    assert counts.dtype == np.uint64
    assert counts.tolist() == [sequence.count(group) for group in range(len(groups))]
    assert stream.position == words.read


@given(seed=SEEDS, capacities=st.lists(st.integers(0, 9), min_size=1, max_size=9), share=st.floats(0, 1))
def test_a_smaller_dose_lies_within_a_greater_one(seed, capacities, share):
    n = int(share * sum(capacities))
    small = allocate(Stream(seed, "groups"), capacities, n)
    great = allocate(Stream(seed, "groups"), capacities, min(n + 1, sum(capacities)))
    assert np.all(small <= great)
    assert small.sum() == n


def test_groups_of_equal_weight_are_as_likely():
    counts = allocate(Stream(5, "groups"), [10**6] * 7, 70_000)
    assert chi_square(counts) > 1e-3


def test_groups_are_picked_by_their_weights():
    from scipy.stats import chisquare

    counts = allocate(Stream(5, "groups"), [10**6] * 3, 96_000, [Fraction(1, 2), 4, Fraction(23, 2)])
    assert chisquare(counts, [3000, 24000, 69000]).pvalue > 1e-3


def _chances(room, n):
    """The chance of every table of counts when each fault picks evenly among the groups with room."""
    if n == 0:
        return {(0,) * len(room): Fraction(1)}
    chances = Counter()
    free = [group for group, left in enumerate(room) if left]
    for group in free:
        left = [units - (index == group) for index, units in enumerate(room)]
        for counts, chance in _chances(left, n - 1).items():
            chances[tuple(count + (index == group) for index, count in enumerate(counts))] += chance / len(free)
    return chances


def test_a_full_group_leaves_the_others_their_chances():
    from scipy.stats import chisquare

    seeds = 9000
    chances = _chances([1, 2, 3], 4)
    cells = Counter(tuple(allocate(Stream(seed, "full"), [1, 2, 3], 4).tolist()) for seed in range(seeds))
    assert set(cells) == set(chances)
    expected = [float(chance * seeds) for chance in chances.values()]
    assert chisquare([cells[counts] for counts in chances], expected).pvalue > 1e-3


@pytest.mark.parametrize("weights", [[2, 4, 6], [Fraction(1, 10), Fraction(2, 10), Fraction(3, 10)]])
def test_only_the_ratios_of_the_weights_matter(weights):
    plain = allocate(Stream(1, "groups"), [50, 50, 50], 90, [1, 2, 3])
    assert allocate(Stream(1, "groups"), [50, 50, 50], 90, weights).tolist() == plain.tolist()


def test_counts_are_these_for_ever():
    assert allocate(Stream(7, "groups"), [100, 3, 100, 100], 40, [1, 1, 0, 2]).tolist() == [8, 3, 0, 29]


@pytest.mark.parametrize("lacking", [0, 1, 1000])
def test_many_groups_are_filled_to_the_brim(lacking):
    counts = allocate(Stream(1, "groups"), [50] * 20_000, 10**6 - lacking)
    assert counts.sum() == 10**6 - lacking
    assert counts.max() == 50


def test_weights_far_apart_still_fill_every_group():
    counts = allocate(Stream(1, "groups"), [5] * 60, 300, [2**power for power in range(60)])
    assert counts.tolist() == [5] * 60


@pytest.mark.parametrize(("weights", "room"), [(None, 10), ([1, 0, 1], 7), ([0, 0, 0], 0)])
def test_more_faults_than_room_are_refused_with_both_numbers(weights, room):
    with pytest.raises(TooFewBits, match=f"^11 asked for, .* room for {room}") as caught:
        allocate(Stream(1, "x"), [3, 3, 4], 11, weights)
    assert caught.value.available == room


def test_no_groups_take_no_faults():
    assert allocate(Stream(1, "x"), [], 0).tolist() == []


@pytest.mark.parametrize("weights", [[1, -1], [1, Fraction(-1, 3)]])
def test_negative_weights_are_refused(weights):
    with pytest.raises(UsageError, match=f"a weight is {weights[1]}"):
        allocate(Stream(1, "x"), [1, 1], 1, weights)


def test_weights_beyond_64_bits_are_refused():
    with pytest.raises(UsageError, match="fewer digits"):
        allocate(Stream(1, "x"), [1, 1], 1, [1, 2**64])


def test_a_weight_for_each_group_is_needed():
    with pytest.raises(ValueError, match="2 weights for 3 groups"):
        allocate(Stream(1, "x"), [1, 1, 1], 1, [1, 1])
