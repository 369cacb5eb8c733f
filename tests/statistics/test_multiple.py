"""Holm's correction: against statsmodels, its level by simulation, and None for what was not tested."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests

from flipper.errors import UsageError
from flipper.statistics.multiple import holm

p_values = st.floats(0, 1)


@pytest.mark.parametrize("number", [1, 2, 7, 40, 300])
def test_statsmodels_finds_the_same(number):
    values = (np.random.default_rng(number).random(number) ** 3).round(2).tolist()  # rounded: some are equal
    assert holm(values) == pytest.approx(multipletests(values, method="holm")[1])


@given(st.lists(st.none() | p_values, max_size=20))
def test_what_was_not_tested_stays_none_and_does_not_count(values):
    adjusted = holm(values)
    assert [each is None for each in adjusted] == [each is None for each in values]
    tested = [each for each in values if each is not None]
    assert [each for each in adjusted if each is not None] == holm(tested)


def test_a_worked_example():
    """Four comparisons by hand: 4 x 0.005, 3 x 0.01, then 2 x 0.03 and 1 x 0.04, which may not fall below it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(st.lists(p_values, min_size=1), st.data())
def test_order_is_kept_and_values_only_rise(values, data):
    adjusted = holm(values)
    assert all(value <= each <= 1 for value, each in zip(values, adjusted, strict=True))
    order = data.draw(st.permutations(range(len(values))))
    assert holm([values[place] for place in order]) == [adjusted[place] for place in order]


def test_the_chance_of_any_false_alarm_stays_at_the_level():
    """20 true null hypotheses, 4,000 times: 0.05 +- 4 standard errors, where plain p values give 0.64."""
    drawn = np.random.default_rng(1).random((4000, 20))
    alarms = np.mean([min(holm(row.tolist())) <= 0.05 for row in drawn])
    assert abs(alarms - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 4000)
    assert np.mean(drawn.min(axis=1) <= 0.05) > 0.6


def test_nothing_to_correct():
    assert holm([]) == []
    assert holm([None, None]) == [None, None]


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_refused(value):
    with pytest.raises(UsageError, match="p value"):
        holm([0.5, value])
