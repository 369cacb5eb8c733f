"""Exposure: units, what is carried over, and the rate against a simulated memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flipper.errors import UsageError
from flipper.faults.strata import FIT_HOURS, MBIT
from flipper.statistics import exposure
from flipper.statistics.exposure import harm_rate, upsets_per_hour
from flipper.statistics.intervals import Interval, wilson


def test_units():
    """One FIT per Mbit: one upset in 10^9 hours of 10^6 bits."""
    assert upsets_per_hour(1, 10**6) * 10**9 == pytest.approx(1)
    assert upsets_per_hour(50, 8 * 10**9) == pytest.approx(50 * 8000 / 1e9)


def test_units_are_those_of_the_fit_option():
    assert (exposure.FIT_HOURS, exposure.MBIT) == (FIT_HOURS, MBIT)


def test_the_interval_is_carried_over():
    rate = harm_rate(100, 2 * 10**9, 0.25, Interval(0.125, 0.5))
    assert rate.per_hour == pytest.approx(100 * 2000 / 1e9 / 4)
    assert (rate.interval.low, rate.interval.high) == pytest.approx((rate.per_hour / 2, rate.per_hour * 2))


@given(st.floats(0, 1e5), st.integers(0, 10**13), st.integers(0, 30), st.integers(1, 16))
def test_n_copies_take_n_times_the_upsets(fit, bits, harmful, copies):
    probability, interval = harmful / 30, wilson(harmful, 30)
    one, many = (harm_rate(fit, held, probability, interval) for held in (bits, copies * bits))
    assert many.per_hour == pytest.approx(copies * one.per_hour)
    assert many.interval.high == pytest.approx(copies * one.interval.high)
    assert one.interval.low <= one.per_hour <= one.interval.high


def test_a_simulated_memory_suffers_at_this_rate():
    """Upsets bit by bit and hour by hour, each harmful by chance, on a scale that can be simulated."""
    bits, hours, fit, probability = 2000, 2000, 10**12, 0.3
    rng = np.random.default_rng(5)
    struck = rng.poisson(fit / 1e9 / 1e6, (hours, bits)).sum()
    expected = harm_rate(fit, bits, probability, Interval(0, 1)).per_hour * hours
    assert abs(rng.binomial(struck, probability) - expected) < 4 * np.sqrt(expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((-1, 5, 0.5), "fit: -1"), ((1, -5, 0.5), "bits: -5"), ((float("inf"), 5, 0.5), "fit: inf"), ((1, 5, 2), "prob")],
)
def test_impossible_numbers_are_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        harm_rate(*arguments, Interval(0, 1))
