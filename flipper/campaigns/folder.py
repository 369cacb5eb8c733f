"""Folder: every file name inside a campaign's folder, and campaign.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from flipper.campaigns.cells import Cell, canonical, cells_of
from flipper.campaigns.settled import read_settled
from flipper.campaigns.spec import Spec, check_recipe, read_spec
from flipper.campaigns.store import trials_there
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
    """The campaign of a TOML file in its folder, which is made, or brought up to date where more is asked for now.

    out: the folder; without it, of the spec's name. changes: keys to replace, such as "axes.count=1,10".
    Raises UsageError for what the spec doesn't make sense of or what contradicts trials that are there, OutputError.
    """
    asked = read_spec(spec, changes)
    folder = Folder(out or Path(asked.name))
    of_shards: Counter[int] = sum(map(trials_there, folder.shards), Counter())
    return settle(asked, folder.path, trials_there(folder.results()) | of_shards)


def settle(spec: Spec, path: Path, finished: Mapping[int, int]) -> Campaign:
    """The campaign in its folder, which is made or brought up to date.

    finished: trials that each cell has results of. Raises UsageError when a changed spec contradicts what is there,
    OutputError when the folder can't be written.
    """
    folder = Folder(path)
    campaign = Campaign(folder, spec, cells_of(spec))
    if folder.campaign.exists():
        campaign = _grown(open_campaign(path), spec, finished)
    document = {"spec": spec.record(), "cells": [cell.record() for cell in campaign.cells]}
    try:
        path.mkdir(parents=True, exist_ok=True)
        with atomic_output(folder.campaign, force=True) as partial:
            partial.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise OutputError(f"can't write the campaign's folder {path}: {error.strerror or error}") from error
    return campaign


def _grown(before: Campaign, spec: Spec, finished: Mapping[int, int]) -> Campaign:
    """The campaign with what a changed spec adds."""
    where = before.folder.path
    if (found := difference(before.spec, spec)) is not None:
        key, old, new = found
        raise UsageError(
            f"{where} has results with {key} = {old}, the spec now says {new}: "
            f"only trials and axis values may be added; choose another --out"
        )
    numbers = {cell.key: cell.number for cell in before.cells}
    cells = cells_of(spec, numbers)
    for cell in before.cells:
        now = next((each for each in cells if each.number == cell.number), None)
        done = finished.get(cell.number, 0)
        if done and now is None:
            raise UsageError(f"{where} has {done} trials of cell {cell.label}, which the spec no longer has")
    return Campaign(before.folder, spec, cells)


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
