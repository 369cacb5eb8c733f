"""What ranks and their launcher say to each other when a rank is lost.

Ranks speak through their pipes; the launcher answers by files in the folder of their rendezvous, since a survivor must
be reachable whatever state its process group is in.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from flipper.errors import TrainingError

BETWEEN: Final = ("notice", "look", "end")
"""What is done between steps, in this order: detect and compare; evaluate and save; end the run."""
MET: Final = {"notice": "noticed", "look": "looked", "end": "ended"}
"""What is done -> the meeting after it, before which nobody goes on."""


@dataclass(frozen=True)
class Dying:
    """A rank is about to kill itself, and so are these others, at the same point. time: CLOCK_MONOTONIC, in seconds, as
    all times here."""

    time: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lost:
    """A rank has lost contact.

    generation: of the process group that broke. completed: steps that this rank has finished. phase: where it was: at
    one of BETWEEN steps, or in the meeting after it; inside the step after `completed`: "meet", "reduce" when it has
    all its gradients, "measure" when all buckets are done. done: buckets of that step that are averaged and applied.
    result: loss, gradient norm and learning rate of the last finished step. error: what it saw.
    """

    generation: int
    completed: int
    phase: str
    done: frozenset[int]
    result: tuple[float, float, float] | None
    error: str
    time: float


@dataclass(frozen=True)
class Ready:
    """A survivor has read who is left."""

    generation: int


@dataclass(frozen=True)
class Joined:
    """A survivor is in the new process group."""

    generation: int


@dataclass(frozen=True)
class Hello:
    """A rank of MPI is there: its number, its process, and whether its MPI has ULFM."""

    rank: int
    pid: int
    ulfm: bool


@dataclass(frozen=True)
class Shrunk:
    """The first rank of a communicator that was shrunk: who is left, by numbers at the start; the step under way; when
    the loss was noticed; when all were in the new one; seconds that the shrinking itself took."""

    ranks: tuple[int, ...]
    step: int
    noticed: float
    joined: float
    shrunk: float


@dataclass(frozen=True)
class Plan:
    """What the launcher tells the survivors.

    ranks: the survivors' numbers at the start, in the order of their new ones. actions: what each does now: "redo" the
    step, "finish" it among the survivors, take it as "done" with `result`, do what it was doing "again", or go "on".
    donors: bucket -> the new rank of a survivor that has it averaged.
    """

    generation: int
    ranks: tuple[int, ...]
    actions: tuple[str, ...]
    donors: dict[int, int] = field(default_factory=dict)
    result: tuple[float, float, float] | None = None

    def write(self, folder: Path) -> None:
        """Where the survivors look for it, whole at once."""
        _put(_plan_path(folder, self.generation), json.dumps(asdict(self)))


def allow(folder: Path, generation: int) -> None:
    """Let the survivors, who are all ready, make their group."""
    _put(_go_path(folder, generation), "")


def await_plan(folder: Path, generation: int, seconds: float) -> Plan:
    """The plan of a generation, as soon as it is there; TrainingError when it doesn't come."""
    path = _plan_path(folder, generation)
    _first([path], seconds)
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    result = record["result"]
    return Plan(
        record["generation"],
        tuple(record["ranks"]),
        tuple(record["actions"]),
        {int(bucket): rank for bucket, rank in record["donors"].items()},
        None if result is None else (result[0], result[1], result[2]),
    )


def await_leave(folder: Path, generation: int, seconds: float) -> bool:
    """Whether the group of this generation may be made; False when there is a later plan, since one more has died."""
    go, later = _go_path(folder, generation), _plan_path(folder, generation + 1)
    return _first([go, later], seconds) == go


def tell_port(folder: Path, generation: int, port: int) -> None:
    """Say where the first survivor of a generation awaits the others."""
    _put(_port_path(folder, generation), str(port))


def await_port(folder: Path, generation: int, seconds: float) -> int:
    """The port of the first survivor, as soon as it is there; TrainingError when it doesn't come."""
    path = _port_path(folder, generation)
    _first([path], seconds)
    return int(path.read_text("utf-8"))


def _first(paths: list[Path], seconds: float) -> Path:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in reversed(paths):
            if path.exists():
                return path
        time.sleep(0.001)
    raise TrainingError(f"the launching process did not say within {seconds:g} s how to go on")


def _put(path: Path, text: str) -> None:
    partial = path.with_suffix(".new")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)


def _plan_path(folder: Path, generation: int) -> Path:
    return folder / f"plan-{generation}.json"


def _port_path(folder: Path, generation: int) -> Path:
    return folder / f"port-{generation}"


def _go_path(folder: Path, generation: int) -> Path:
    return folder / f"go-{generation}"


def plan_of(generation: int, recovery: str, reports: Mapping[int, Lost]) -> Plan:
    """What each survivor does, given where it is.

    All give what they measured at the end of a step, and meet after what is done between steps, so that they are apart
    by one such part at most:
    - some had all buckets of a step but not yet its loss, while others had that, too: it is done, with their result;
    - some were doing a thing between steps: all do it again, but for those that had met after an earlier one;
    - some had not begun to average the step under way, so that no bucket of it is averaged: all do the step anew;
    - else all are in the midst of a step, and the recovery says what becomes of it.
    """
    ranks = tuple(sorted(reports))
    completed = max(report.completed for report in reports.values())
    behind = {rank for rank in ranks if reports[rank].completed < completed}
    phases = {rank: reports[rank].phase for rank in ranks if rank not in behind}
    inside = [phase for phase in phases.values() if phase not in _PLACES]
    latest = max((_PLACES[phase] for phase in phases.values() if phase in _PLACES), default=(0, True))
    working = bool(behind) or any(_PLACES.get(phase) == (latest[0], False) for phase in phases.values())
    midst = not behind and len(inside) == len(phases) and "meet" not in inside

    def action(rank: int) -> str:
        if rank in behind:
            return "done"
        if phases[rank] in _PLACES:
            return "again" if working and not inside and _PLACES[phases[rank]][0] == latest[0] else "on"
        return "finish" if recovery == "lossy" and midst else "redo"

    donors: dict[int, int] = {}
    if midst:
        for number, rank in reversed(list(enumerate(ranks))):
            donors.update(dict.fromkeys(reports[rank].done, number))
    result = next((reports[rank].result for rank in ranks if rank not in behind), None)
    return Plan(generation, ranks, tuple(map(action, ranks)), donors, result)


_PLACES: Final = {
    phase: (number, met) for number, work in enumerate(BETWEEN) for phase, met in ((work, False), (MET[work], True))
}
"""Phase between steps -> its place in their order, and whether it is the meeting after."""
