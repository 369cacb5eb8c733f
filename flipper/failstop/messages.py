"""What ranks and their launcher say to each other when a rank is lost.

Ranks speak through their pipes; the launcher answers by files in the folder of their rendezvous, since a survivor must
be reachable whatever state its process group is in.
"""

from __future__ import annotations

import json
import os
import time
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
    """A rank is about to kill itself. time: CLOCK_MONOTONIC, in seconds, as all times here."""

    time: float


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
    time: float


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


def _go_path(folder: Path, generation: int) -> Path:
    return folder / f"go-{generation}"
