"""Draws without replacement: minimal prefixes of the stream, nested doses, uniform over subsets."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_draw import Words, chi_square, first_distinct

from flipper.errors import TooFewBits
from flipper.faults import sampling, taken
from flipper.faults import stream as stream_module
from flipper.faults.sampling import distinct
from flipper.faults.stream import Stream

SEEDS = st.integers(0, 2**64 - 1)

BATCHES = ["default", "tiny"]


@pytest.fixture(params=BATCHES)
def _batches(request, monkeypatch):
    """Everything is done in one batch, or in many, with the small and with the general set."""
    if request.param == "tiny":
        monkeypatch.setattr(stream_module, "_CHUNK", 3)
        monkeypatch.setattr(sampling, "_BATCH", 5)
        monkeypatch.setattr(taken, "_SMALL_SPAN", 0)
        monkeypatch.setattr(taken, "_PER_MEMBER", 0)


@pytest.mark.usefixtures("_batches")
class TestPrefix:
    @given(seed=SEEDS, size=st.integers(1, 200), share=st.floats(0, 0.5))
    def test_up_to_half_it_is_the_first_distinct_words(self, seed, size, share):
        n = int(size * share)
        words = Words(seed, "positions")
        expected = first_distinct(words, size, n)
        stream = Stream(seed, "positions")
        drawn = distinct(stream, size, n)
        assert drawn.dtype == np.uint64
        assert drawn.tolist() == sorted(expected)
        assert stream.position == words.read
        assert distinct(Stream(seed, "positions"), size, n, keep_order=True).tolist() == expected

    @given(seed=SEEDS, size=st.integers(1, 200), share=st.floats(0.5, 1))
    def test_above_half_the_first_distinct_words_are_spared(self, seed, size, share):
        n = max(int(size * share), size // 2 + 1)
        spared = first_distinct(Words(seed, "positions"), size, size - n)
        expected = sorted(set(range(size)) - set(spared))
        assert distinct(Stream(seed, "positions"), size, n).tolist() == expected
        assert distinct(Stream(seed, "positions"), size, n, keep_order=True).tolist() == expected

    @given(seed=SEEDS, size=st.integers(2, 2**64 - 1), n=st.integers(0, 30), more=st.integers(0, 30))
    def test_a_smaller_dose_lies_within_a_greater_one(self, seed, size, n, more):
        most = min(n + more, size // 2)
        n = min(n, most)
        small = distinct(Stream(seed, "positions"), size, n, keep_order=True).tolist()
        great = distinct(Stream(seed, "positions"), size, most, keep_order=True).tolist()
        assert great[:n] == small
        assert set(distinct(Stream(seed, "positions"), size, n).tolist()) <= set(great)


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.parametrize(("size", "n"), [(5, 2), (6, 3), (7, 4), (6, 1), (6, 5)])
def test_every_subset_is_as_likely(size, n, keep_order):
    cells = Counter(
        frozenset(distinct(Stream(seed, "subsets"), size, n, keep_order=keep_order).tolist()) for seed in range(6000)
    )
    assert chi_square([cells[frozenset(subset)] for subset in combinations(range(size), n)]) > 1e-3


def test_every_order_is_as_likely():
    cells = Counter(
        tuple(distinct(Stream(seed, "orders"), 6, 3, keep_order=True).tolist()) for seed in range(12000)
    )
    assert chi_square([cells[order] for order in permutations(range(6), 3)]) > 1e-3


def test_faults_are_these_for_ever():
    drawn = distinct(Stream(7, "positions"), 10**9, 5, keep_order=True)
    assert drawn.tolist() == [852372769, 853464733, 858032354, 740481026, 301111802]
    assert distinct(Stream(2026, "positions/fc.weight"), 64, 5).tolist() == [11, 22, 39, 54, 63]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_all_but_a_few_of_many_are_drawn_at_once(missing):
    size = 10**6
    drawn = distinct(Stream(3, "positions"), size, size - missing)
    assert len(drawn) == size - missing
    assert np.all(drawn[1:] > drawn[:-1])
    spared = first_distinct(Words(3, "positions"), size, missing)
    assert set(range(size)) - set(drawn.tolist()) == set(spared)


def test_a_large_draw_is_sorted_distinct_and_spread_evenly():
    drawn = distinct(Stream(3, "positions"), 16 * 10**9, 10**6)
    assert len(drawn) == 10**6
    assert np.all(drawn[1:] > drawn[:-1])
    assert chi_square(np.bincount((drawn // np.uint64(10**9)).astype(np.int64), minlength=16)) > 1e-3


def test_nothing_of_nothing_is_nothing():
    assert distinct(Stream(1, "x"), 0, 0).tolist() == []


@pytest.mark.parametrize(("size", "n"), [(0, 1), (5, 6), (10**6, 10**15)])
def test_more_faults_than_units_are_refused_with_both_numbers(size, n):
    with pytest.raises(TooFewBits, match=f"^{n:,} asked for, but only {size:,} can be struck") as caught:
        distinct(Stream(1, "x"), size, n)
    assert caught.value.available == size
