"""Binomial and Poisson counts against exact distributions, and decimals read as they are written."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, comb, factorial, floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_draw import pure_words

from flipper.errors import UsageError
from flipper.faults.counts import binomial, exact, poisson
from flipper.faults.stream import Stream

ONE = 2**128
UNIFORMS = st.integers(0, ONE - 1)
PROBABILITIES = st.fractions(0, 1, max_denominator=10**6)


class Fixed(Stream):
    """A stream whose one uniform is chosen by the test."""

    def __init__(self, uniform):
        super().__init__(0, "fixed")
        self.uniform = uniform

    def bits(self, n):
        assert n == 128
        return self.uniform


def _assert_inverts(count_of, masses):
    """The count is k for every uniform between the cumulative masses below and up to k.

    The count never falls as the uniform rises, so the two ends of each interval settle all of it. Where the mass
    is an exact multiple of 2**-128 the rounding of the terms may decide: one uniform each side is left out.
    """
    reached = Fraction(0)
    for count, mass in enumerate(masses):
        first, last = ceil(reached * ONE) + 1, floor((reached + mass) * ONE) - 2
        reached += mass
        if 0 <= first <= last < ONE:
            assert count_of(first) == count
            assert count_of(last) == count


@pytest.mark.parametrize("trials", [1, 2, 3, 7, 20, 41])
@pytest.mark.parametrize("probability", ["0.5", "0.1", "0.999", "1e-9", "0.37"])
def test_binomial_is_the_exact_inverse_for_every_uniform(trials, probability):
    p = Fraction(probability)
    masses = [comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(trials + 1)]
    assert sum(masses) == 1
    _assert_inverts(lambda uniform: binomial(Fixed(uniform), trials, p), masses)


@settings(max_examples=60)
@given(trials=st.integers(1, 30), p=PROBABILITIES)
def test_binomial_is_the_exact_inverse_for_any_probability(trials, p):
    masses = [comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(trials + 1)]
    _assert_inverts(lambda uniform: binomial(Fixed(uniform), trials, p), masses)


@pytest.mark.parametrize("mean", ["0.001", "0.5", "1", "3.7", "20"])
def test_poisson_is_the_exact_inverse_for_every_uniform(mean):
    mean = Fraction(mean)
    weights = [mean**k / factorial(k) for k in range(180)]  # the rest is below 2**-300
    # Sum of all weights, e**mean, to more than 128 bits.
    total = sum((mean**k / factorial(k) for k in range(180, 220)), sum(weights))
    _assert_inverts(lambda uniform: poisson(Fixed(uniform), mean), [weight / total for weight in weights])


@settings(max_examples=200)
@given(uniform=UNIFORMS, trials=st.integers(0, 2000), ends=st.tuples(PROBABILITIES, PROBABILITIES))
def test_binomial_never_falls_as_the_probability_rises(uniform, trials, ends):
    low, high = (binomial(Fixed(uniform), trials, p) for p in sorted(ends))
    assert 0 <= low <= high <= trials


MEANS = st.fractions(0, 2000, max_denominator=1000)


@settings(max_examples=200)
@given(uniform=UNIFORMS, ends=st.tuples(MEANS, MEANS))
def test_poisson_never_falls_as_the_mean_rises(uniform, ends):
    low, high = (poisson(Fixed(uniform), mean) for mean in sorted(ends))
    assert 0 <= low <= high


LARGE = [(10**14, "1e-7"), (10**9, "0.5"), (16 * 10**9, "1e-4"), (10**7, "0.999"), (10**13, "1e-12"), (10**5, "0.3")]


@pytest.mark.parametrize(("trials", "probability"), LARGE)
def test_large_binomials_agree_with_scipy(trials, probability):
    from scipy.stats import binom

    for uniform in (0.001, 0.31, 0.5, 0.77, 0.9999):
        count = binomial(Fixed(int(uniform * ONE)), trials, Fraction(probability))
        below, reached = binom.cdf([count - 1, count], trials, float(probability))
        assert below - 1e-9 <= uniform <= reached + 1e-9
        assert reached - below < 0.2 or count < 20


@pytest.mark.parametrize("mean", ["1e7", "12345.678", "1e5", "0.25"])
def test_large_poissons_agree_with_scipy(mean):
    from scipy.stats import poisson as reference

    for uniform in (0.001, 0.31, 0.5, 0.77, 0.9999):
        count = poisson(Fixed(int(uniform * ONE)), Fraction(mean))
        below, reached = reference.cdf([count - 1, count], float(mean))
        assert below - 1e-9 <= uniform <= reached + 1e-9


@pytest.mark.parametrize("uniform", [0, 1, ONE // 2, ONE - 1])
def test_the_far_ends_of_the_uniform_give_counts_in_range(uniform):
    assert 0 <= binomial(Fixed(uniform), 5, Fraction(1, 3)) <= 5
    assert abs(binomial(Fixed(uniform), 10**6, Fraction(1, 2)) - 500_000) < 14 * 500
    assert abs(poisson(Fixed(uniform), Fraction(10**6)) - 10**6) < 15 * 1000


def _even_by_seed(draw, distribution):
    """The p-value of counts of many seeds: spread at random between their cumulative ends, they are uniform."""
    from scipy.stats import kstest

    counts = np.array([draw(Stream(seed, "counts")) for seed in range(1500)])
    spread = np.random.default_rng(1).random(len(counts))
    return kstest(distribution.cdf(counts - 1) + spread * distribution.pmf(counts), "uniform").pvalue


def test_binomial_counts_of_many_seeds_follow_the_distribution():
    from scipy.stats import binom

    p_value = _even_by_seed(lambda stream: binomial(stream, 10**6, Fraction(1, 1000)), binom(10**6, 0.001))
    assert p_value > 1e-3


def test_poisson_counts_of_many_seeds_follow_the_distribution():
    from scipy.stats import poisson as reference

    assert _even_by_seed(lambda stream: poisson(stream, Fraction(7, 2)), reference(3.5)) > 1e-3


def test_counts_are_these_for_ever():
    assert binomial(Stream(7, "counts"), 10**10, Fraction(1, 10**6)) == 10059
    assert poisson(Stream(7, "counts"), Fraction(10**4)) == 10059


def test_a_count_takes_one_uniform_of_two_words():
    first, second = pure_words(7, "counts", 2)
    for draw in (lambda s: binomial(s, 1000, Fraction(1, 3)), lambda s: poisson(s, Fraction(333))):
        stream = Stream(7, "counts")
        assert draw(stream) == draw(Fixed(first | second << 64))
        assert stream.position == 2


@pytest.mark.parametrize(
    ("trials", "probability", "count"), [(0, "0.5", 0), (9, "0", 0), (9, "1", 9), (0, "1", 0), (10**30, "0", 0)]
)
def test_certain_binomials(trials, probability, count):
    stream = Stream(7, "counts")
    assert binomial(stream, trials, Fraction(probability)) == count
    assert stream.position == 2


def test_a_mean_of_zero_gives_no_events():
    assert poisson(Stream(7, "counts"), Fraction(0)) == 0


def test_vanishing_probabilities_give_nothing():
    assert binomial(Stream(7, "counts"), 10**14, exact("1e-300")) == 0
    assert poisson(Stream(7, "counts"), exact("1e-300")) == 0


@pytest.mark.parametrize("probability", ["-0.1", "1.0000001", "3"])
def test_probabilities_out_of_range_are_refused(probability):
    with pytest.raises(UsageError, match=r"must lie in 0 \.\. 1"):
        binomial(Stream(7, "counts"), 5, Fraction(probability))


def test_negative_means_are_refused():
    with pytest.raises(UsageError, match="can't be negative"):
        poisson(Stream(7, "counts"), Fraction(-1))


@pytest.mark.parametrize(
    "draw", [lambda s: poisson(s, Fraction(10**400)), lambda s: binomial(s, 2**63, Fraction(1, 2))]
)
def test_counts_too_wide_to_draw_are_refused_at_once(draw):
    with pytest.raises(UsageError, match="at most 1e\\+12 can be drawn"):
        draw(Stream(7, "counts"))


DECIMALS = [
    ("0.1", Fraction(1, 10)),
    (0.1, Fraction(1, 10)),
    (np.float64(0.1), Fraction(1, 10)),
    (1e-9, Fraction(1, 10**9)),
    (5e-324, Fraction(5, 10**324)),
    (" 1e-9 ", Fraction(1, 10**9)),
    ("2.50E+3", Fraction(2500)),
    (".5", Fraction(1, 2)),
    ("3.", Fraction(3)),
    ("-7", Fraction(-7)),
    (12, Fraction(12)),
    (Fraction(1, 3), Fraction(1, 3)),
    ("0.30000000000000000000000000001", Fraction(30000000000000000000000000001, 10**29)),
]


@pytest.mark.parametrize(("written", "number"), DECIMALS)
def test_decimals_count_as_they_are_written(written, number):
    assert exact(written) == number


@pytest.mark.parametrize(
    "written", ["", "x", "1/3", "nan", "inf", "1e", "1_000", "0x10", "1e999999999", "9" * 500, "1 2", "١", float("nan")]
)
def test_what_is_no_decimal_is_refused_at_once(written):
    with pytest.raises(UsageError, match="is not a number; write a decimal"):
        exact(written)
