"""Cells: the settings that a campaign crosses, and the seed of each trial in them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flipper.campaigns import deaths
from flipper.campaigns.command_lines import GIVEN, places, settings
from flipper.campaigns.fault_kinds import RANK_LOSS
from flipper.campaigns.spec import AMOUNTS, DRAWING, Spec
from flipper.errors import UsageError
from flipper.faults.model import FaultModel
from flipper.training.faults_file import faults_of
from flipper.training.layouts import Parallel
from flipper.training.reach import Reach


@dataclass(frozen=True)
class Cell:
    """All trials with the same settings. number: its place in the campaign, from 0. axes: only those that are set."""

    number: int
    axes: Mapping[str, Any]
    trials: int

    @property
    def parallel(self) -> str:
        """The layout, or the command's name."""
        return str(self.axes["parallel"])

    @property
    def reach(self) -> str:
        """Which copies of an element are struck."""
        return str(self.axes.get("reach", "all"))

    @property
    def model(self) -> FaultModel:
        """What the faults are drawn from."""
        return fault_model(self.axes)

    @property
    def key(self) -> str:
        """The axes as text: equal for equal settings, whatever the order in which they were given."""
        return canonical(self.axes)

    @property
    def drawing(self) -> str:
        """Which faults are drawn, without how many: what trials share whose faults nest."""
        return canonical({axis: self.axes[axis] for axis in (*DRAWING, *deaths.POINT) if axis in self.axes})

    @property
    def label(self) -> str:
        """The axes for people: `ddp:2 bits=exponent count=1`."""
        rest = (f"{axis}={_short(value)}" for axis, value in self.axes.items() if axis != "parallel")
        return " ".join((self.parallel, *rest))

    def record(self) -> dict[str, Any]:
        """As it stands in campaign.json."""
        return {"cell": self.number, "axes": dict(self.axes), "trials": self.trials}

    def without(self, *axes: str) -> str:
        """The key of the cells that differ from this one in these axes only."""
        return canonical({axis: value for axis, value in self.axes.items() if axis not in axes})


@dataclass(frozen=True)
class Start:
    """What a trial starts from: the clean state of one layout and training seed, or a user's checkpoint.

    settings: axes that a user's command line asks for, and their values.
    """

    parallel: str
    training_seed: int
    checkpoint: str | None = None
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def setting(self) -> str:
        """The settings as text, "" where there are none."""
        return canonical(dict(self.settings)) if self.settings else ""

    @property
    def label(self) -> str:
        """For people."""
        rest = (f"{axis}={value}" for axis, value in self.settings)
        checkpoint = () if self.checkpoint is None else (self.checkpoint,)
        return " ".join((self.parallel, *checkpoint, *rest, f"training seed {self.training_seed}"))


def starts(spec: Spec, cells: Iterable[Cell]) -> list[Start]:
    """All that trials of these cells start from, in order."""
    numbers = range(len(spec.training_seeds))
    return list(dict.fromkeys(start_of(spec, cell, number) for cell in cells for number in numbers))


def null_starts(spec: Spec, cells: Iterable[Cell]) -> list[list[Start]]:
    """What null trials start from: all training seeds of each layout, and of each setting of a user's command."""
    found: dict[tuple[str, str | None, str], list[Start]] = {}
    for start in starts(spec, cells):
        found.setdefault((start.parallel, start.checkpoint, start.setting), []).append(start)
    return list(found.values())


def start_of(spec: Spec, cell: Cell, trial: int) -> Start:
    """What a trial starts from."""
    asked = settings(spec.commands[cell.parallel], cell.axes) if spec.commands else ()
    return Start(cell.parallel, training_seed(spec, trial), cell.axes.get("checkpoint"), asked)


def cells_of(spec: Spec, known: Mapping[str, int] | None = None) -> tuple[Cell, ...]:
    """The cells of a campaign, by number; each once, though several slices may name it.

    known: numbers that cells have already, by key; new ones are counted on from there, so that old results stay theirs.
    Raises UsageError naming the values that can't go together.
    """
    numbers = dict(known or {})
    found: dict[str, Cell] = {}
    for part in spec.slices:
        for values in itertools.product(*part.axes.values()):
            axes = dict(zip(part.axes, values, strict=True))
            key = canonical(axes)
            trials = part.trials or spec.trials
            if key in found and found[key].trials >= trials:
                continue
            number = numbers.setdefault(key, max(numbers.values(), default=-1) + 1)
            found[key] = Cell(number, axes, trials)
            _check(spec, found[key])
    return tuple(sorted(found.values(), key=lambda cell: cell.number))


def _check(spec: Spec, cell: Cell) -> None:
    try:
        model = cell.model
        if spec.fault == RANK_LOSS:
            deaths.check_cell(cell.axes, spec.recipe or "", spec.save_every)
        elif spec.recipe:
            layout = Parallel.parse(cell.parallel)
            Reach.parse(cell.reach, layout)
            if "checkpoint" in cell.axes:
                raise UsageError("an axis checkpoint goes with [commands]; a recipe makes its own")
        else:
            if cell.parallel not in spec.commands:
                raise UsageError(f"no command {cell.parallel!r}; [commands] has {', '.join(spec.commands)}")
            if cell.reach != "all":
                raise UsageError(f"reach = {cell.reach!r} goes with a recipe; a command resumes from an altered file")
            if "checkpoint" not in cell.axes:
                raise UsageError("an axis checkpoint is missing: the file that the commands resume from")
            for place in places(spec.commands[cell.parallel]):
                if place not in (*GIVEN, *cell.axes):
                    raise UsageError(f"commands.{cell.parallel} asks for {{{place}}}, an axis that is not given")
    except UsageError as error:
        raise UsageError(f"cell {cell.label}: {error}") from error
    if spec.census and (model.count != 1 or model.parsed_effect.unit != "bit" or model.spread != "uniform"):
        raise UsageError(f'cell {cell.label}: trials = "all" strikes every eligible bit by itself; leave count at 1')


def fault_model(axes: Mapping[str, Any]) -> FaultModel:
    """The fault model that a cell's axes name; raises UsageError."""
    options = {axis: axes[axis] for axis in (*DRAWING, *AMOUNTS) if axis in axes}
    model = faults_of({**options, "seed": 0}).model
    assert model is not None
    return model


def trial_seed(spec: Spec, cell: Cell, trial: int) -> int:
    """The seed that a trial's faults are drawn with: the same whatever the layout, the reach and the amount.

    sha256 over the campaign's seed, the drawing, the step or epoch of injection, the training seed and the number.
    """
    text = _seed_text(spec.seed, cell.drawing, spec.inject_epoch, spec.inject_step)
    digest = hashlib.sha256(f"{text}\0{training_seed(spec, trial)}\0{trial}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


@functools.lru_cache(maxsize=1024)
def _seed_text(seed: int, drawing: str, epoch: int | None, step: int | None) -> str:
    return "\0".join(map(str, (seed, drawing, epoch if step is None else f"step {step}")))


def training_seed(spec: Spec, trial: int) -> int:
    """The training seed that a trial belongs to: in turns, so that trials are spread evenly."""
    return spec.training_seeds[trial % len(spec.training_seeds)]


def effective_reach(parallel: str, reach: str) -> str:
    """`all` where `one` would be the same, since the layout keeps one copy of each element."""
    return "all" if reach == "one" and not Parallel.parse(parallel).replicated else reach


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def pairs_in_turn(cells: tuple[Cell, ...], limits: Mapping[int, int]) -> Iterator[tuple[Cell, int]]:
    """All trials, the first of every cell, then the second of every cell ...; limits: trials by cell number."""
    for trial in range(max(limits.values(), default=0)):
        for cell in cells:
            if trial < limits[cell.number]:
                yield cell, trial


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_short, value))
    return canonical(value) if isinstance(value, dict) else str(value)
