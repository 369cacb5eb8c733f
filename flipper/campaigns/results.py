"""Results: a campaign's stored runs, judged by its thresholds; and one row a trial for export."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Final

from flipper.campaigns.cells import Cell
from flipper.campaigns.fault_kinds import RANK_LOSS
from flipper.campaigns.folder import Campaign
from flipper.campaigns.outcomes import Band, Judgement, band_of, bands, golden_key, judge
from flipper.campaigns.record import RunRecord
from flipper.campaigns.store import Store
from flipper.training.layouts import Parallel

MEASURES: Final = (
    "trial", "training_seed", "seed", "outcome", "group", "metric_final", "metric_golden", "loss_final",
    "max_excursion", "steps_to_recover", "area", "state_distance", "spiked", "nonfinite_state", "struck_nonfinite",
    "replicas_diverged", "first_detector", "first_detected_step", "stopped_early", "seconds", "state_digest",
    "fingerprint", "error",
)  # fmt: skip
"""Columns of an exported row, after the cell and its axes."""

DEATH_MEASURES: Final = (
    "kills", "accuracy_loss", "overhead_seconds", "overhead_fraction", "recovery_seconds", "steps_again",
    "world_size_end",
)  # fmt: skip
"""Columns after those, where ranks die."""


@dataclass(frozen=True)
class Trial:
    """One struck run, its cell, its golden run, and what it came to."""

    cell: Cell
    run: RunRecord
    golden: RunRecord
    judgement: Judgement

    @property
    def harmful(self) -> bool:
        """Whether it is not benign: the primary endpoint."""
        return self.judgement.group != "benign"


@dataclass(frozen=True)
class Results:
    """All of a campaign's runs. facts: values of the whole campaign."""

    campaign: Campaign
    goldens: dict[tuple[Any, ...], RunRecord]
    controls: list[RunRecord]
    nulls: list[RunRecord]
    trials: list[Trial]
    audits: list[RunRecord]
    bands: dict[str, Band]
    facts: dict[str, Any]

    def band(self, parallel: str) -> Band:
        """The band of a layout."""
        return band_of(self.campaign.spec, self.bands, parallel)

    def judge_null(self, null: RunRecord) -> Judgement:
        """A null trial, by the rules for trials."""
        return judge(null, self.goldens[golden_key(null)], self.band(null.parallel), self.campaign.spec)

    @property
    def lose_ranks(self) -> bool:
        """Whether its faults are deaths of ranks."""
        return self.campaign.spec.fault == RANK_LOSS

    @cached_property
    def by_cell(self) -> dict[int, list[Trial]]:
        """Trials by cell number, in the order of their own numbers."""
        found: dict[int, list[Trial]] = {cell.number: [] for cell in self.campaign.cells}
        for trial in self.trials:
            found[trial.cell.number].append(trial)
        return found

    @cached_property
    def clean_seconds(self) -> dict[tuple[str, str], float]:
        """By layout and machine, of clean runs from where trials start, with nothing saved: the median."""
        seconds: dict[tuple[str, str], list[float]] = {}
        for run in (*self.controls, *self.nulls):
            seconds.setdefault((run.parallel, run.fingerprint), []).append(run.seconds)
        return {key: median(values) for key, values in seconds.items()}

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes that some cell has, in order."""
        return tuple(dict.fromkeys(axis for cell in self.campaign.cells for axis in cell.axes))


def load_results(campaign: Campaign, *, detail: bool = False) -> Results:
    """Read and judge all that is stored. detail: with per-step series and faults.

    Raises UsageError when nothing was stored, OutputError for a damaged database.
    """
    spec, cells = campaign.spec, {cell.number: cell for cell in campaign.cells}
    with Store(campaign.folder.results()) as store:
        goldens = {golden_key(run): run for run in store.runs("golden", detail=detail)}
        nulls = list(store.runs("null"))
        found = bands(spec, nulls, goldens)
        trials = []
        for run in store.runs("trial", detail=detail):
            if run.cell in cells:
                golden = goldens[golden_key(run)]
                judgement = judge(run, golden, band_of(spec, found, run.parallel), spec)
                trials.append(Trial(cells[run.cell], run, golden, judgement))
        controls, audits = list(store.runs("control")), list(store.runs("audit"))
        return Results(campaign, goldens, controls, nulls, trials, audits, found, store.facts())


def columns(results: Results) -> tuple[str, ...]:
    """The columns of exported rows."""
    return "cell", *results.axes, *MEASURES, *(DEATH_MEASURES if results.lose_ranks else ())


def rows(results: Results) -> Iterator[dict[str, Any]]:
    """One row a trial, by cell and number; an axis that its cell doesn't have is None."""
    for trial in results.trials:
        run, judgement = trial.run, trial.judgement
        yield {
            "cell": trial.cell.number,
            **{axis: trial.cell.axes.get(axis) for axis in results.axes},
            "trial": run.trial,
            "training_seed": run.training_seed,
            "seed": run.seed,
            "outcome": judgement.outcome,
            "group": judgement.group,
            "metric_final": run.metric,
            "metric_golden": trial.golden.metric,
            "loss_final": run.loss,
            "max_excursion": judgement.max_excursion,
            "steps_to_recover": judgement.steps_to_recover,
            "area": judgement.area,
            "state_distance": run.state_distance,
            "spiked": any(name in ("loss-spike", "grad-norm-spike") for name, _, _ in run.detected),
            "nonfinite_state": bool(run.nonfinite),
            "struck_nonfinite": bool(run.struck_nonfinite),
            "replicas_diverged": any(apart != 0 for _, apart in run.replicas) or _replicas_detected(run),
            "first_detector": judgement.first_detector,
            "first_detected_step": judgement.first_detected_step,
            "stopped_early": run.ended if run.ended_early else None,
            "seconds": run.seconds,
            "state_digest": run.state_digest,
            "fingerprint": run.fingerprint,
            "error": run.error,
            **(measured(results, trial) if results.lose_ranks else {}),
        }


def measured(results: Results, trial: Trial) -> dict[str, Any]:
    """What a trial's deaths cost; None for what a run that failed didn't come to.

    accuracy_loss: by how much the last metric is worse than the golden run's. overhead_seconds: of the whole run, over
    a clean one's; overhead_fraction: the same as a part of that. Times depend on what else the machine does.
    """
    run, golden = trial.run, trial.golden
    usual = results.clean_seconds.get((run.parallel, run.fingerprint))
    over = None if run.failed or usual is None else run.seconds - usual
    loss = None
    if not run.failed and run.metric is not None and golden.metric is not None:
        loss = golden.metric - run.metric if results.campaign.spec.better == "higher" else run.metric - golden.metric
    size = Parallel.parse(run.parallel).ranks if run.world_size is None else run.world_size
    return {
        "kills": " ".join(run.deaths),
        "accuracy_loss": loss,
        "overhead_seconds": over,
        "overhead_fraction": over / usual if over is not None and usual else None,
        "recovery_seconds": run.recovery_seconds,
        "steps_again": run.steps_again,
        "world_size_end": None if run.failed else size,
    }


def _replicas_detected(run: RunRecord) -> bool:
    return any(name == "replicas" for name, _, _ in run.detected)


def finite(value: float | None) -> float | None:
    """The value, or None where it is no finite number."""
    return value if value is not None and math.isfinite(value) else None
