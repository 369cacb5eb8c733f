"""Outcomes follow the rules in their order, from series and thresholds alone."""

import math

import pytest

from flipper.campaigns.outcomes import GROUPS, OUTCOMES, Band, bands, calibrates, golden_key, judge
from flipper.campaigns.record import RunRecord
from flipper.campaigns.spec import Spec

SPEC = Spec("s", (), recipe="digits-mlp", training_seeds=(1, 2), extreme_factor=10.0)
GOLDEN = RunRecord(
    "golden", "ddp:2", 1, evals=[(10, 0.5, 0.80), (20, 0.4, 0.90), (30, 0.3, 0.95)], loss=0.3, metric=0.95,
    max_abs_parameter=2.0, resume_digest="golden", detected=[("loss-spike", 5, 0)],
)  # fmt: skip
BAND = Band(0.02)


def run(*metrics: float, **values: object) -> RunRecord:
    """A trial struck after step 10, with these metrics at steps 20 and 30."""
    evals = [(step, 0.1, metric) for step, metric in zip((20, 30), metrics, strict=False)]
    usual: dict[str, object] = {"loss": 0.3, "max_abs_parameter": 2.0, "resume_digest": "other"}
    return RunRecord("trial", "ddp:2", 1, first_step=10, last_step=30, evals=evals, **{**usual, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trial", "outcome"),
    [
        (run(0.90, 0.95), "masked"),
        (run(0.89, 0.94), "masked"),
        (run(0.90, 0.99), "masked"),
        (run(0.85, 0.95), "recovered"),
        (run(math.nan, 0.95), "recovered"),
        (run(0.90, 0.92), "degraded"),
        (run(0.90, math.nan), "degraded"),
        (run(0.90, 0.95, resume_digest="golden"), "identical"),
        (run(0.10, 0.10, resume_digest="golden", max_abs_parameter=20.1), "extreme"),
        (run(0.90, 0.95, max_abs_parameter=20.0), "masked"),
        (run(0.10, 0.10, loss=math.nan, max_abs_parameter=99.0), "non-finite"),
        (run(0.10, 0.10, loss=math.inf), "non-finite"),
        (run(ended="hang", error="x", loss=math.nan), "hang"),
        (run(ended="crash", error="x"), "crash"),
        (run(ended="refused", error="x", loss=None), "refused"),
    ],
)
def test_the_first_rule_that_holds_names_the_outcome(trial: RunRecord, outcome: str) -> None:
    assert judge(trial, GOLDEN, BAND, SPEC).outcome == outcome


def test_lower_is_better_for_a_loss() -> None:
    from dataclasses import replace

    spec = replace(SPEC, better="lower")
    assert judge(run(0.90, 0.99), GOLDEN, BAND, spec).outcome == "degraded"
    assert judge(run(0.90, 0.10), GOLDEN, BAND, spec).outcome == "masked"


def test_every_outcome_has_its_group() -> None:
    assert list(GROUPS) == list(OUTCOMES)
    assert [name for name in OUTCOMES if GROUPS[name] == "sdc"] == ["degraded", "extreme"]
    assert [name for name in OUTCOMES if GROUPS[name] == "due"] == ["non-finite", "hang", "crash", "refused"]


def test_measures_are_those_of_the_curves() -> None:
    found = judge(run(0.85, 0.94), GOLDEN, BAND, SPEC)
    assert found.max_excursion == pytest.approx(0.05)
    assert found.steps_to_recover == 20  # from the fault at 10 to the evaluation at 30
    assert found.area == pytest.approx(10 * 0.05 + 10 * (0.05 + 0.01) / 2)
    assert judge(run(0.90, 0.95), GOLDEN, BAND, SPEC).steps_to_recover == 0
    assert judge(run(0.90, 0.50), GOLDEN, BAND, SPEC).steps_to_recover is None


def test_a_detection_that_the_golden_run_has_too_is_none() -> None:
    trial = run(0.9, 0.9, detected=[("loss-spike", 5, 0), ("grad-norm-spike", 12, 0), ("nonfinite-loss", 12, 0)])
    found = judge(trial, GOLDEN, BAND, SPEC)
    assert (found.first_detector, found.first_detected_step) == ("grad-norm-spike", 12)
    assert judge(run(0.9, 0.9, detected=[("loss-spike", 5, 0)]), GOLDEN, BAND, SPEC).first_detector is None


def test_half_of_each_training_seeds_null_trials_set_the_band_and_the_others_do_not() -> None:
    curves = [[(20, 0.1, 0.90 - n / 100), (30, 0.1, 0.95)] for n in range(8)]
    nulls = [RunRecord("null", "ddp:2", 1 + n % 2, trial=n, first_step=10, evals=curves[n]) for n in range(8)]
    assert [calibrates(SPEC, null) for null in nulls] == [True, True, False, False, True, True, False, False]
    goldens = {golden_key(n): RunRecord("golden", "ddp:2", n.training_seed, evals=GOLDEN.evals) for n in nulls}
    assert bands(SPEC, nulls, goldens)["ddp:2"].width == pytest.approx(0.05)  # trial 5's, and not 7's
    assert bands(SPEC, nulls, goldens)["ddp:2"].nulls == 4
