"""Sequential stopping: against a walk trial by trial over all outcomes, by simulation, and as a rule of prefixes."""

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from flipper.errors import UsageError
from flipper.statistics.boundary import least_coverage, stops_at
from flipper.statistics.intervals import Interval, clopper_pearson
from flipper.statistics.sequential import Decision, Plan


@cache
def exact_interval(trials, alpha):
    """Clopper and Pearson's interval for 0 to `trials` hits."""
    hits = np.arange(trials + 1)
    low = np.where(hits > 0, beta.ppf(alpha / 2, np.maximum(hits, 1), trials - hits + 1), 0)
    high = np.where(hits < trials, beta.isf(alpha / 2, hits + 1, np.maximum(trials - hits, 1)), 1)
    return low, high


def walked(proportion, margin, alpha, looks):
    """One trial after the other: probability of being there with each number of hits, taken out where it stops.

    Returns coverage of the proportion, its average number of trials and the probability of having stopped.
    """
    there, covered, average, stopped = np.ones(1), 0.0, 0.0, 0.0
    for trial in range(1, looks[-1] + 1):
        there = np.append(there * (1 - proportion), 0) + np.append(0, there * proportion)
        if trial not in looks:
            continue
        low, high = exact_interval(trial, alpha)
        ends = ((high - low) / 2 <= margin) | (trial == looks[-1])
        covered += there[ends & (low <= proportion) & (proportion <= high)].sum()
        average += trial * there[ends].sum()
        stopped += there[ends].sum()
        there = np.where(ends, 0, there)
    return covered, average, stopped


PLANS = [(0.2, 0.95, None), (0.1, 0.9, None), (0.1, 0.95, None), (0.05, 0.95, None), (0.05, 0.95, 210), (0.1, 0.99, 30)]


@pytest.mark.parametrize(("margin", "confidence", "cap"), PLANS)
def test_coverage_as_walked_is_what_the_plan_promises(margin, confidence, cap):
    """At proportions that the plan was not made from, and just beside the ends of intervals, where coverage jumps."""
    plan = Plan.for_margin(margin, confidence, cap)
    rng = np.random.default_rng(11)
    ends = np.concatenate([np.concatenate(exact_interval(look, plan.alpha)) for look in plan.looks])
    ends = rng.choice(ends[(ends > 0) & (ends < 1)], 20, replace=False)
    for proportion in [0.0, 1.0, 0.5, *rng.random(20), *(ends * (1 - 1e-9)), *(ends * (1 + 1e-9))]:
        covered, average, stopped = walked(proportion, margin, plan.alpha, plan.looks)
        assert stopped == pytest.approx(1)
        assert covered >= plan.coverage - 1e-9 >= confidence - 1e-9
        if 0 < proportion < 1:
            assert average == pytest.approx(plan.expected_trials(proportion), abs=1e-6)


def test_the_least_coverage_is_reached():
    """The stated minimum is no mere lower bound: a fine scan by the walk comes down to it."""
    plan = Plan.for_margin(0.1, 0.95)
    ends = np.concatenate([np.concatenate(exact_interval(look, plan.alpha)) for look in plan.looks])
    beside = [end * (1 + side) for end in ends[(ends > 0) & (ends <= 0.5)] for side in (-1e-9, 1e-9)]
    least = min(walked(proportion, 0.1, plan.alpha, plan.looks)[0] for proportion in beside)
    assert least == pytest.approx(plan.coverage, abs=1e-6)


@pytest.mark.parametrize(("margin", "cap"), [(0.05, None), (0.1, 90)])
def test_leaving_out_what_is_improbable_changes_nothing(margin, cap):
    """Coverage with every stop summed at every proportion, at the ends of intervals and on a grid."""
    plan = Plan.for_margin(margin, 0.95, cap)
    stops = stops_at(plan.looks, plan.bounds, plan.alpha)
    ends = np.concatenate([end for stop in stops for end in (stop.low, stop.high)])
    proportions = np.concatenate([ends[(ends > 0) & (ends <= 0.5)], np.arange(1, 1001) / 2000])
    covered = np.zeros(len(proportions))
    for stop in stops:
        inside = (stop.low[:, None] < proportions) & (proportions < stop.high[:, None])
        covered += (stop.chances(proportions) * inside).sum(axis=0)
    assert least_coverage(stops) == pytest.approx(covered.min(), abs=1e-12) == pytest.approx(plan.coverage)


def test_without_lowering_the_promise_is_broken():
    """The same rule with 95 % intervals at the looks holds 94.4 % just above what 5 hits of 100 allow."""
    looks = tuple(range(50, 426, 25))
    _, high = exact_interval(100, 0.05)
    assert walked(high[5] * (1 + 1e-9), 0.05, 0.05, looks)[0] == pytest.approx(0.94408, abs=1e-5)


@pytest.mark.parametrize(("margin", "confidence", "cap"), PLANS)
def test_every_look_stops_just_where_the_interval_is_narrow_enough(margin, confidence, cap):
    plan = Plan.for_margin(margin, confidence, cap)
    for look, bound in zip(plan.looks, plan.bounds, strict=True):
        low, high = exact_interval(look, plan.alpha)
        hits = np.arange(look + 1)
        assert ((np.minimum(hits, look - hits) <= bound) == ((high - low) / 2 <= margin)).all()


def test_looks_are_every_25_from_50_up_to_where_a_half_is_known():
    plan = Plan.for_margin(0.05)
    assert plan.looks == tuple(range(50, plan.maximum + 1, 25))
    assert clopper_pearson(plan.maximum // 2, plan.maximum, 1 - plan.alpha).half_width <= 0.05
    before = plan.looks[-2]
    assert clopper_pearson(before // 2, before, 1 - plan.alpha).half_width > 0.05
    assert 0 < plan.alpha < 0.05


def test_a_cap_is_the_last_look():
    assert Plan.for_margin(0.05, cap=210).looks == (50, 75, 100, 125, 150, 175, 200, 210)
    assert Plan.for_margin(0.05, cap=200).looks[-2:] == (175, 200)
    assert Plan.for_margin(0.05, cap=30).looks == (30,)
    assert Plan.for_margin(0.05, cap=20_000) == Plan.for_margin(0.05)
    assert Plan.for_margin(0.05, cap=30).alpha == pytest.approx(0.05), "one look needs no lowering"


def simulated(plan, proportion, campaigns, seed):
    drawn = np.random.default_rng(seed).random((campaigns, plan.maximum)) < proportion
    return [plan.decide(row) for row in drawn]


@pytest.mark.parametrize("proportion", [0.004, 0.06, 0.25, 0.5, 0.9])
def test_simulated_campaigns_keep_margin_and_confidence(proportion):
    plan, campaigns = Plan.for_margin(0.05), 1500
    decided = simulated(plan, proportion, campaigns, 2)
    assert all(each.stop and each.interval.half_width <= 0.05 for each in decided)
    covered = np.mean([proportion in each.interval for each in decided])
    assert covered >= 0.95 - 4 * np.sqrt(0.95 * 0.05 / campaigns)
    taken = np.array([each.trials for each in decided])
    assert abs(taken.mean() - plan.expected_trials(proportion)) <= 4 * taken.std() / np.sqrt(campaigns) + 1e-9


def test_rare_outcomes_need_fewer_trials_than_a_fixed_number():
    plan = Plan.for_margin(0.05)
    assert plan.expected_trials(0.02) < 0.2 * plan.maximum
    assert plan.expected_trials(0) == pytest.approx(50)
    assert plan.expected_trials(0.3) == pytest.approx(plan.expected_trials(0.7))


@st.composite
def series(draw):
    proportion = draw(st.floats(0, 1))
    return np.random.default_rng(draw(st.integers(0, 10**6))).random(draw(st.integers(0, 500))) < proportion


@given(series(), st.data())
def test_only_the_finished_prefix_up_to_the_first_deciding_look_counts(outcomes, data):
    plan = Plan.for_margin(0.05)
    decided = plan.decide(outcomes.tolist())
    cut = data.draw(st.integers(0, len(outcomes)))
    earlier = plan.decide(outcomes[:cut].tolist())
    if decided.stop and cut >= decided.trials:
        assert earlier == decided
    else:
        assert not earlier.stop
        assert earlier.next_look > cut
        assert earlier.trials <= cut
    if decided.interval is not None:
        assert decided.hits == outcomes[: decided.trials].sum()
        assert decided.interval == clopper_pearson(decided.hits, decided.trials, 1 - plan.alpha)
    mirrored = plan.decide((~outcomes).tolist())
    assert (mirrored.stop, mirrored.trials) == (decided.stop, decided.trials)


def test_before_the_first_look_nothing_is_said():
    assert Plan.for_margin(0.05).decide([False] * 49) == Decision(False, 0, 0, None, 50)


def test_a_run_without_hits_stops_at_the_first_look():
    decided = Plan.for_margin(0.05).decide([False] * 60)
    assert (decided.stop, decided.trials, decided.hits, decided.next_look) == (True, 50, 0, None)
    assert decided.interval.low == 0
    assert binom.cdf(0, 50, decided.interval.high) == pytest.approx(Plan.for_margin(0.05).alpha / 2)
    assert isinstance(decided.interval, Interval)


def test_a_plan_is_kept_as_json_and_computed_once():
    plan = Plan.for_margin(0.05)
    assert Plan.from_record(json.loads(json.dumps(plan.record()))) == plan
    assert Plan.for_margin(0.05, 0.95) is plan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0,), "margin: 0 is not between 0 and 0.5"),
        ((0.5,), "margin: 0.5 is not between 0 and 0.5"),
        ((0.003,), "margin: 0.003 takes more than 20000 trials; give a larger one, or a number of trials"),
        ((0.1, 1), "confidence: 1 is not between 0 and 1"),
        ((0.1, 0.95, 0), "cap: 0 is not between 1 and 20000"),
    ],
)
def test_impossible_plans_are_refused(arguments, said):
    with pytest.raises(UsageError) as caught:
        Plan.for_margin(*arguments)
    assert str(caught.value) == said
