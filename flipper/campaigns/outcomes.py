"""Outcomes: what a trial is called, judged from its stored series, its golden run's and the band of null trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flipper.campaigns.record import IDENTICAL, RunRecord
from flipper.campaigns.spec import Spec

OUTCOMES: Final = (
    "identical", "masked", "recovered", "degraded", "extreme", "non-finite", "hang", "crash", "refused",
)  # fmt: skip
"""From harmless to fatal."""

GROUPS: Final = {
    **dict.fromkeys(("identical", "masked", "recovered"), "benign"),
    **dict.fromkeys(("degraded", "extreme"), "sdc"),
    **dict.fromkeys(("non-finite", "hang", "crash", "refused"), "due"),
}


@dataclass(frozen=True)
class Band:
    """How far below its golden run a clean run's metric may fall, in units of the metric, and where that comes from.

    nulls: calibrating null trials; 0 where the spec gives a number.
    """

    width: float
    nulls: int = 0


@dataclass(frozen=True)
class Judgement:
    """A trial's outcome and what was measured beside it.

    max_excursion: the most that the metric fell short of the golden run's after the fault; steps_to_recover: from the
    fault to the first evaluation from which on it stays inside the band, None when it never does; area: between the
    curves, in metric x steps; first_detector, first_detected_step: what saw the fault first, which in the golden run
    saw nothing.
    """

    outcome: str
    max_excursion: float | None
    steps_to_recover: int | None
    area: float | None
    first_detector: str | None
    first_detected_step: int | None

    @property
    def group(self) -> str:
        """benign, sdc or due."""
        return GROUPS[self.outcome]


def judge(run: RunRecord, golden: RunRecord, band: Band, spec: Spec) -> Judgement:
    """The first rule that holds, and the measurements."""
    gaps = shortfalls(run, golden, spec.better)
    detector, step = _first_detection(run, golden)
    worst = max((gap for _, gap in gaps), default=None)
    return Judgement(
        outcome_of(run, golden, band, spec),
        worst,
        _steps_to_recover(run.first_step, gaps, band) if run.error is None else None,
        _area(run.first_step, gaps),
        detector,
        step,
    )


def outcome_of(run: RunRecord, golden: RunRecord, band: Band, spec: Spec) -> str:
    """The first rule that holds, of OUTCOMES."""
    if run.failed:
        return run.ended
    if run.loss is None or not math.isfinite(run.loss):
        return "non-finite"
    largest, usual = run.max_abs_parameter, golden.max_abs_parameter
    if largest is not None and usual is not None and largest > spec.extreme_factor * usual:
        return "extreme"
    if run.resume_digest and run.resume_digest == golden.resume_digest:
        return IDENTICAL
    gaps = [gap for _, gap in shortfalls(run, golden, spec.better)]
    if not gaps or not gaps[-1] <= band.width:
        return "degraded"
    return "masked" if max(gaps) <= band.width else "recovered"


def shortfalls(run: RunRecord, golden: RunRecord, better: str) -> list[tuple[int, float]]:
    """By how much each evaluation after the fault is worse than the golden run's at the same step; NaN is infinite."""
    usual = {step: value for step, _, value in golden.evals}
    gaps = []
    for step, _, value in run.evals:
        if step > run.first_step and step in usual:
            gap = usual[step] - value if better == "higher" else value - usual[step]
            gaps.append((step, math.inf if math.isnan(gap) else gap))
    return gaps


def _steps_to_recover(start: int, gaps: Sequence[tuple[int, float]], band: Band) -> int | None:
    """0 where no evaluation was outside the band."""
    if not gaps or not gaps[-1][1] <= band.width:
        return None
    outside = [step for step, gap in gaps if not gap <= band.width]
    return min(step for step, _ in gaps if step > outside[-1]) - start if outside else 0


def _area(start: int, gaps: Sequence[tuple[int, float]]) -> float | None:
    """Trapezoids between evaluations; from the fault to the first one, its gap."""
    if not gaps or any(math.isinf(gap) for _, gap in gaps):
        return None
    area, last, height = 0.0, start, gaps[0][1]
    for step, gap in gaps:
        area += (step - last) * (height + gap) / 2
        last, height = step, gap
    return area


def _first_detection(run: RunRecord, golden: RunRecord) -> tuple[str | None, int | None]:
    usual = {(detector, step) for detector, step, _ in golden.detected}
    news = [(step, detector) for detector, step, _ in run.detected if (detector, step) not in usual]
    if not news:
        return None, None
    step, detector = min(news)
    return detector, step


def bands(spec: Spec, nulls: Iterable[RunRecord], goldens: Mapping[Any, RunRecord]) -> dict[str, Band]:
    """The band of each layout: the spec's number, or the worst of the calibrating null trials at any evaluation."""
    found: dict[str, list[float]] = {}
    for null in nulls:
        golden = goldens.get(golden_key(null))
        if calibrates(spec, null) and golden is not None:
            gaps = [gap for _, gap in shortfalls(null, golden, spec.better)]
            found.setdefault(null.parallel, []).append(max((*gaps, 0.0)))
    if spec.tolerance is not None:
        return {}
    return {parallel: Band(max(worst), len(worst)) for parallel, worst in found.items()}


def band_of(spec: Spec, found: Mapping[str, Band], parallel: str) -> Band:
    """The band of one layout; without null trials nothing below the golden run is let pass."""
    if spec.tolerance is not None:
        return Band(spec.tolerance)
    return found.get(parallel, Band(0.0))


def calibrates(spec: Spec, null: RunRecord) -> bool:
    """Whether a null trial is one of those that set the band, every other one of each training seed; the rest test it.

    With one null trial a seed, all set it.
    """
    return null.trial // len(spec.training_seeds) % 2 == 0


def golden_key(run: RunRecord) -> tuple[str, int, str | None, str]:
    """Which golden run it is compared with: of its layout, training seed, checkpoint and kind of machine."""
    return run.parallel, run.training_seed, run.checkpoint, run.fingerprint
