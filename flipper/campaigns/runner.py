"""Runner: a campaign's runs as an executor is handed them, whoever makes them: a recipe or the user's own command.

The three functions can be sent to another process by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from flipper.campaigns import commands, death_runs, runs
from flipper.campaigns.cells import Cell, Start, start_of
from flipper.campaigns.fault_kinds import RANK_LOSS
from flipper.campaigns.folder import Campaign
from flipper.campaigns.record import RunRecord
from flipper.campaigns.spec import Spec


class _Golden(Protocol):
    @property
    def golden(self) -> RunRecord: ...
    @property
    def control(self) -> RunRecord: ...


class Runner(Protocol):
    """What the modules `runs`, `death_runs` and `commands` all offer; a plan says which faults a trial has."""

    def golden_of(self, campaign: Campaign, start: Start) -> _Golden: ...
    def null_trial(self, campaign: Campaign, start: Start, number: int) -> RunRecord: ...
    def struck_trial(
        self, campaign: Campaign, cell: Cell, trial: int, *, full: bool = False, keep: Path | None = None
    ) -> RunRecord: ...
    def parts(self, golden: RunRecord, control: RunRecord) -> str | None: ...
    def note_on(self, spec: Spec, golden: RunRecord, control: RunRecord) -> str | None: ...
    def clean_of(self, campaign: Campaign, start: Start, golden: RunRecord) -> Path: ...
    def plan_of(self, campaign: Campaign, cell: Cell, trial: int, clean: Path) -> Any: ...
    def plan_key(self, campaign: Campaign, start: Start, cell: Cell, plan: Any) -> str: ...


def runner_of(spec: Spec) -> Runner:
    """The module for a campaign."""
    if spec.fault == RANK_LOSS:
        return death_runs
    return commands if spec.commands else runs


def run_golden(campaign: Campaign, start: Start) -> tuple[RunRecord, ...]:
    """A golden run and its control."""
    found = runner_of(campaign.spec).golden_of(campaign, start)
    return found.golden, found.control


def run_null(campaign: Campaign, start: Start, number: int) -> tuple[RunRecord, ...]:
    """A null trial, behind the golden run that it is compared with."""
    return *run_golden(campaign, start), runner_of(campaign.spec).null_trial(campaign, start, number)


def run_trial(
    campaign: Campaign, cell: Cell, trial: int, full: bool = False, keep: bool = False
) -> tuple[RunRecord, ...]:
    """A trial, behind the golden run that it is compared with. full: to its last step; keep: its altered files."""
    place = campaign.folder.trial(cell.number, trial) if keep else None
    record = runner_of(campaign.spec).struck_trial(campaign, cell, trial, full=full, keep=place)
    return *run_golden(campaign, start_of(campaign.spec, cell, trial)), record
