"""Evidence: what figures and table need of the runs' long series, taken run by run so that memory stays small."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from flipper.campaigns.record import RunRecord
from flipper.campaigns.results import Results, Trial
from flipper.campaigns.store import Store

FEW: Final = 10
"""Faults of a trial, at most, for its outcome to say something of each place that it struck."""

SHOWN: Final = 5
"""Faults of a trial that the table shows one by one."""


Place = tuple[str, int]
"""A tensor, and a bit position in its elements."""

Key = TypeVar("Key", bound=Hashable)


@dataclass
class Struck:
    """Trials that struck a place, and those of them that were harmful."""

    trials: int = 0
    harmful: int = 0


@dataclass(frozen=True)
class Divergence:
    """How far the replicas of one struck run were apart: the largest difference of any element, at each probe."""

    trial: Trial
    steps: array[float]
    apart: array[float]

    @property
    def diverged(self) -> bool:
        """Whether they ever were; NaN is no agreement."""
        return any(value != 0 for value in self.apart)


@dataclass
class Evidence:
    """Of all trials.

    few: of each trial with at most FEW faults whether it was harmful, and the places that it struck.
    faults: (cell, trial) -> its first SHOWN faults. divergences: of the trials whose replicas were probed.
    """

    few: list[tuple[bool, frozenset[Place]]] = field(default_factory=list)
    faults: dict[tuple[int, int], list[tuple[Any, ...]]] = field(default_factory=dict)
    divergences: list[Divergence] = field(default_factory=list)

    def add(self, trial: Trial, run: RunRecord) -> None:
        """Take what is needed of a trial; run: its record with all series."""
        self.faults[run.cell, run.trial] = run.faults[:SHOWN]
        if run.replicas:
            steps, apart = zip(*run.replicas, strict=True)
            self.divergences.append(Divergence(trial, array("d", steps), array("d", map(_number, apart))))
        if 0 < run.struck <= FEW:
            places = frozenset((tensor, bit) for tensor, _, bits, _, _ in run.faults for bit in bits)
            self.few.append((trial.harmful, places))

    def tally(self, of: Callable[[Place], Key]) -> dict[Key, Struck]:
        """Trials with few faults by what `of` makes of the places that they struck; each counts once for each."""
        found: dict[Key, Struck] = {}
        for harmful, places in self.few:
            for key in {of(place) for place in places}:
                struck = found.setdefault(key, Struck())
                struck.trials += 1
                struck.harmful += harmful
        return found


def gather(results: Results) -> Evidence:
    """Read the long series of all trials; raises OutputError for a damaged database."""
    trials = {(trial.cell.number, trial.run.trial): trial for trial in results.trials}
    evidence = Evidence()
    with Store(results.campaign.folder.results()) as store:
        for run in _known(store.runs("trial", detail=True), trials):
            evidence.add(trials[run.cell, run.trial], run)
    return evidence


def _known(runs: Iterable[RunRecord], trials: dict[tuple[int, int], Trial]) -> Iterable[RunRecord]:
    """Without trials that came after the results were read."""
    return (run for run in runs if (run.cell, run.trial) in trials)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
