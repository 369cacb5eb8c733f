"""Folder: every file name inside a campaign's folder, and campaign.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from flipper.campaigns.cells import Cell, canonical, cells_of
from flipper.campaigns.owners import Owner
from flipper.campaigns.settled import read_settled
from flipper.campaigns.spec import Spec, check_recipe, read_spec
from flipper.campaigns.store import Numbers, lock_of, numbers_there
from flipper.checkpoints.output import atomic_output
from flipper.errors import DAMAGED, OutputError, UsageError

MAY_CHANGE: Final = frozenset(
    ("slices", "trials", "margin", "confidence", "tolerance", "equivalence", "extreme_factor", "contrast", "fit",
     "timeout", "better", "null_trials", "commands", "here", "slurm")
)  # fmt: skip
"""Keys of a spec that may differ from those of the results that are there; of some, the values may only grow."""


@dataclass(frozen=True)
class Folder:
    """A campaign's folder."""

    path: Path

    @property
    def campaign(self) -> Path:
        """The resolved campaign: its spec and cells."""
        return self.path / "campaign.json"

    @property
    def report(self) -> Path:
        """The report page."""
        return self.path / "report.html"

    def results(self, shard: tuple[int, int] | None = None) -> Path:
        """The database of all trials, or of one shard's, (number from 1, how many)."""
        return self.path / ("results.sqlite" if shard is None else f"results-{shard[0]}-of-{shard[1]}.sqlite")

    @property
    def shards(self) -> list[Path]:
        """The databases of shards that are there."""
        return sorted(self.path.glob("results-*-of-*.sqlite"))

    @property
    def has_results(self) -> bool:
        """Whether runs are stored, or a golden run lies ready: what all that is added to has to go with."""
        return bool(self.numbers()) or any(self.path.glob("golden/*/[!.]*"))

    def numbers(self) -> Numbers:
        """The numbers of the runs that are stored, in all databases together."""
        found: Numbers = {}
        for database in (self.results(), *self.shards):
            for key, numbers in numbers_there(database).items():
                found.setdefault(key, set()).update(numbers)
        return found

    def others_at_work(self) -> list[Owner]:
        """Processes but for this one that write results here."""
        holders = (Owner.read(lock_of(database)) for database in (self.results(), *self.shards))
        return [each for each in holders if each is not None and each != Owner.here() and not each.gone]

    @property
    def jobs(self) -> Path:
        """What a batch system's jobs are handed, and what they write."""
        return self.path / "jobs"

    def golden(self, fingerprint: str, parallel: str, seed: int) -> Path:
        """Where the golden run of a layout and a training seed lies, on one kind of machine."""
        return self.path / "golden" / fingerprint / f"{parallel}-seed{seed}"

    def log(self, name: str) -> Path:
        """What a run that failed has written."""
        return self.path / "logs" / f"{name}.log"

    def trial(self, cell: int, trial: int) -> Path:
        """What --keep keeps of a trial."""
        return self.path / "trials" / f"cell{cell}-trial{trial}"


@dataclass(frozen=True)
class Campaign:
    """A campaign in its folder: what was asked for, and the cells that this makes."""

    folder: Folder
    spec: Spec
    cells: tuple[Cell, ...]

    def cell(self, number: int) -> Cell:
        """The cell of a number; raises UsageError."""
        for cell in self.cells:
            if cell.number == number:
                return cell
        raise UsageError(f"no cell {number}; this campaign has 0 to {max(c.number for c in self.cells)}")


def open_campaign(path: Path) -> Campaign:
    """The campaign of a folder that was run before; raises UsageError."""
    folder = Folder(path)
    spec, cells = read_settled(folder.campaign)
    try:
        check_recipe(spec)
        numbers = {canonical(cell["axes"]): cell["cell"] for cell in cells}
        return Campaign(folder, spec, cells_of(spec, numbers))
    except DAMAGED as error:
        raise UsageError(f"{folder.campaign} is damaged: {error}") from error


def campaign_of(spec: Path, out: Path | None = None, changes: Sequence[str] = ()) -> Campaign:
    """The campaign of a TOML file in its folder, which is made, or brought up to date, when the campaign is run.

    out: the folder; without it, of the spec's name. changes: keys to replace, such as "axes.count=1,10".
    Raises UsageError for what the spec doesn't make sense of or what contradicts results that are there, OutputError.
    """
    asked = read_spec(spec, changes)
    return planned(asked, out or Path(asked.name))


def planned(spec: Spec, path: Path) -> Campaign:
    """The campaign as a spec makes it of what its folder holds, which stays as it is.

    Raises UsageError when the spec contradicts results that are there, OutputError while another spec's are made.
    """
    folder = Folder(path)
    if not folder.campaign.exists():
        return Campaign(folder, spec, cells_of(spec))
    before = open_campaign(path)
    return before if before.spec == spec else _grown(before, spec)


def settle(spec: Spec, path: Path) -> Campaign:
    """The campaign in its folder, which is made or brought up to date; raises as `planned` and `write` do."""
    campaign = planned(spec, path)
    write(campaign)
    return campaign


def is_written(campaign: Campaign) -> bool:
    """Whether its folder says what the campaign is."""
    try:
        return campaign.folder.campaign.read_text("utf-8") == _text(campaign)
    except (OSError, ValueError):
        return False


def write(campaign: Campaign) -> None:
    """Let its folder say what the campaign is; OutputError when it can't be written.

    Raises UsageError when the folder has come to hold another campaign since this one was planned.
    """
    folder = campaign.folder
    if planned(campaign.spec, folder.path) != campaign:
        raise UsageError(f"{folder.path} has been changed by another run meanwhile; run it again")
    if is_written(campaign):
        return
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with atomic_output(folder.campaign, force=True) as partial:
            partial.write_text(_text(campaign), "utf-8")
    except OSError as error:
        raise OutputError(f"can't write the campaign's folder {folder.path}: {error.strerror or error}") from error


def _text(campaign: Campaign) -> str:
    document = {"spec": campaign.spec.record(), "cells": [cell.record() for cell in campaign.cells]}
    return json.dumps(document, indent=1) + "\n"


def _grown(before: Campaign, spec: Spec) -> Campaign:
    """The campaign with what a changed spec adds; another one in its place where it has no results."""
    folder = before.folder
    if (found := difference(before.spec, spec)) is not None:
        key, old, new = found
        if folder.has_results:
            raise UsageError(
                f"{folder.path} has results with {key} = {old}, the spec now says {new}: "
                f"only trials and axis values may be added; choose another --out"
            )
        if others := folder.others_at_work():
            raise OutputError(
                f"{others[0]} runs the campaign in {folder.path} with {key} = {old}, the spec now says {new}: "
                f"wait for it, or choose another --out"
            )
        return Campaign(folder, spec, cells_of(spec))
    campaign = Campaign(folder, spec, cells_of(spec, {cell.key: cell.number for cell in before.cells}))
    _check_kept(before, campaign, folder.numbers())
    return campaign


def _check_kept(before: Campaign, now: Campaign, there: Numbers) -> None:
    """Raise UsageError for results that a changed spec asks no longer for."""
    where, spec = before.folder.path, now.spec
    cells = {cell.number: cell for cell in now.cells}
    for cell in before.cells:
        numbers = there.get(("trial", cell.number), set())
        if numbers and cell.number not in cells:
            raise UsageError(f"{where} has {len(numbers)} trials of cell {cell.label}, which the spec no longer has")
        if not spec.census and spec.margin is None and numbers:
            _check_no_fewer(where, "trials", f" of cell {cell.label}", numbers, cells[cell.number].trials)
    if spec.tolerance is None:
        _check_no_fewer(where, "null_trials", "", there.get(("null", -1), set()), spec.null_trials)


def _check_no_fewer(where: Path, key: str, of_what: str, numbers: set[int], asked: int) -> None:
    count = max(numbers, default=-1) + 1
    if asked < count:
        raise UsageError(
            f"{where} has results with {key} = {count}{of_what}, the spec now says {asked}: "
            f"only trials and axis values may be added; give {key} = {count} or more, or choose another --out"
        )


def difference(old: Spec, new: Spec) -> tuple[str, str, str] | None:
    """The first key in which results of one spec are none of another, and both values; None where there is none."""
    for each in fields(Spec):
        was, now = getattr(old, each.name), getattr(new, each.name)
        if each.name not in MAY_CHANGE and was != now:
            return each.name, _shown(was), _shown(now)
    for name, command in old.commands.items():
        if new.commands.get(name, command) != command:
            return f"commands.{name}", command, new.commands[name]
    return None


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str | int | float | bool) or value is None else str(value)
