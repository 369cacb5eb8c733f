"""Runner: who makes the runs of a campaign: `runs` those of a recipe, `commands` those of the user's own training."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from flipper.campaigns import commands, runs
from flipper.campaigns.cells import Cell, Start
from flipper.campaigns.folder import Campaign
from flipper.campaigns.record import RunRecord
from flipper.campaigns.spec import Spec
from flipper.faults.plan import FaultPlan


class Runner(Protocol):
    """What both modules offer; functions that can be handed to another process by name."""

    def run_golden(self, campaign: Campaign, start: Start) -> tuple[RunRecord, ...]: ...
    def run_null(self, campaign: Campaign, start: Start, number: int) -> tuple[RunRecord, ...]: ...
    def run_trial(
        self, campaign: Campaign, cell: Cell, trial: int, full: bool = False, keep: bool = False
    ) -> tuple[RunRecord, ...]: ...
    def parts(self, golden: RunRecord, control: RunRecord) -> str | None: ...
    def note_on(self, spec: Spec, golden: RunRecord, control: RunRecord) -> str | None: ...
    def clean_of(self, campaign: Campaign, start: Start, golden: RunRecord) -> Path: ...
    def plan_of(self, campaign: Campaign, cell: Cell, trial: int, clean: Path) -> FaultPlan: ...
    def plan_key(self, campaign: Campaign, start: Start, cell: Cell, plan: FaultPlan) -> str: ...


def runner_of(spec: Spec) -> Runner:
    """The module for a campaign."""
    return commands if spec.commands else runs
