"""Between training seeds: against scipy, and coverage by simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t

from flipper.errors import UsageError
from flipper.statistics.between import over_seeds

values = st.floats(-1e6, 1e6)


@given(st.lists(values, min_size=2, max_size=30), st.floats(0.01, 0.999))
def test_scipy_finds_the_same(per_seed, confidence):
    found = over_seeds(per_seed, confidence)
    assert found.mean == pytest.approx(np.mean(per_seed), abs=1e-9)
    assert found.deviation == pytest.approx(np.std(per_seed, ddof=1), abs=1e-9)
    scale = np.std(per_seed, ddof=1) / np.sqrt(len(per_seed))
    expected = t.interval(confidence, len(per_seed) - 1, loc=np.mean(per_seed), scale=max(scale, 1e-300))
    assert (found.interval.low, found.interval.high) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert not found.one_run


def test_by_hand():
    """Three seeds: mean 2, deviation 1, and the table's t of 4.303 at two degrees of freedom."""
    found = over_seeds([1, 2, 3])
    assert (found.mean, found.deviation, found.values) == (2, 1, (1, 2, 3))
    assert found.interval.half_width == pytest.approx(4.303 / 3**0.5, abs=3e-4)


def test_one_seed_speaks_of_one_training_run():
    found = over_seeds([0.25])
    assert (found.mean, found.deviation, found.interval, found.one_run) == (0.25, None, None, True)


def test_equal_values_have_no_spread():
    found = over_seeds([0.1, 0.1, 0.1])
    assert found.deviation == 0
    assert found.interval.half_width == 0


def test_no_seed_is_refused():
    with pytest.raises(UsageError, match="at least one training seed"):
        over_seeds([])


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_the_interval_covers_the_mean_over_all_seeds(seeds):
    drawn = np.random.default_rng(seeds).normal(0.3, 0.1, (3000, seeds))
    covered = np.mean([0.3 in over_seeds(row.tolist()).interval for row in drawn])
    assert abs(covered - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 3000)
