"""Study: what an allreduce costs on a mesh with holes, against the same mesh without."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from flipper.errors import UsageError
from flipper.mesh.chips import Hole, Mesh
from flipper.mesh.cost import Links, seconds
from flipper.mesh.plan import plan
from flipper.mesh.proof import MOST, Proof, Traffic, prove, traffic
from flipper.mesh.schedule import Schedule, distance
from flipper.mesh.workload import Training

COLUMNS: Final = (
    "shape", "failed", "survivors", "algorithm", "bytes", "steps", "max_link_load", "conflicts", "seconds",
    "intact_seconds", "efficiency", "verified", "variant", "problem",
)  # fmt: skip
TRAINING_COLUMNS: Final = (
    "model", "samples_per_chip", "compute_seconds", "overlap", "step_seconds", "intact_step_seconds", "step_overhead",
    "throughput",
)  # fmt: skip


SIZES: Final = ("1x1", "2x2", "4x4")

WAY_COLUMNS: Final = ("shape", "algorithm", "phase", "source", "target", "links", "shortest", "route")


@dataclass(frozen=True)
class Question:
    """What is asked: one allreduce on one mesh. size: bytes, where no training is given; proved: whether it is proved
    where the mesh isn't too large for it."""

    shape: str
    holes: tuple[Hole, ...]
    algorithm: str
    links: Links = field(default_factory=Links)
    size: float = 100e6
    training: Training | None = None
    proved: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.bytes < math.inf:
            raise UsageError(f"--bytes {self.size:g}: give the vector's bytes, 1 or more")

    @property
    def bytes(self) -> float:
        """Of the vector."""
        return self.size if self.training is None else self.training.size

    @property
    def mesh(self) -> Mesh:
        """With its holes. Raises UsageError."""
        return Mesh.parse(self.shape, self.holes)


@dataclass(frozen=True)
class Case:
    """An answer. schedule: None where the mesh isn't served, and `problem` says why. seconds: on this mesh;
    intact_seconds: on the one without holes; proof: None where there is none."""

    question: Question
    schedule: Schedule | None
    seconds: float | None = None
    intact_seconds: float | None = None
    traffic: Traffic | None = None
    proof: Proof | None = None
    problem: str | None = None

    @property
    def efficiency(self) -> float | None:
        """The share of the intact mesh's throughput that is left to the allreduce."""
        if self.seconds is None or self.intact_seconds is None:
            return None
        return self.intact_seconds / self.seconds if self.seconds else 1.0

    def ways(self) -> Iterator[dict[str, object]]:
        """A row for each pair of chips whose messages don't go straight along a row or column."""
        if self.schedule is None:
            return
        mesh = self.schedule.mesh
        for phase in self.schedule.phases:
            talking = set(zip(phase.lanes.source.tolist(), phase.lanes.target.tolist(), strict=True))
            for (source, target), route in sorted(phase.routes.items()):
                if (source, target) in talking:
                    yield {
                        "shape": mesh.shape,
                        "algorithm": self.schedule.algorithm,
                        "phase": phase.name,
                        "source": _place(mesh, source),
                        "target": _place(mesh, target),
                        "links": len(route) - 1,
                        "shortest": distance(mesh, source, target),
                        "route": " ".join(_place(mesh, chip) for chip in route),
                    }

    def record(self) -> dict[str, object]:
        """The row that `flipper study mesh` prints."""
        asked, mesh, found = self.question, self.question.mesh, self.schedule
        row: dict[str, object] = {
            "shape": mesh.shape,
            "failed": [str(hole) for hole in asked.holes],
            "survivors": len(mesh.survivors),
            "algorithm": asked.algorithm,
            "bytes": round(asked.bytes),
            "steps": None if found is None else found.steps,
            "max_link_load": None if self.traffic is None else self.traffic.max_link_load,
            "conflicts": None if self.traffic is None else self.traffic.conflicts,
            "seconds": self.seconds,
            "intact_seconds": self.intact_seconds,
            "efficiency": self.efficiency,
            "verified": None if self.proof is None else self.proof.holds,
            "variant": None if found is None else found.variant,
            "problem": self.problem if self.proof is None else self.proof.problem,
        }
        if asked.training is not None:
            row |= dict.fromkeys(TRAINING_COLUMNS)
            row["model"] = asked.training.model
            if self.seconds is not None and self.intact_seconds is not None:
                row |= asked.training.record(self.seconds, self.intact_seconds, len(mesh.survivors) / mesh.size)
        return row


def _place(mesh: Mesh, chip: int) -> str:
    return "{},{}".format(*mesh.place(chip))


def study(asked: Question) -> Case:
    """Plan, prove and time one allreduce. Raises UsageError for what is no mesh; one that isn't served is an answer."""
    mesh, size = asked.mesh, asked.bytes
    try:
        schedule = plan(mesh, asked.algorithm, size, asked.links)
    except UsageError as error:
        return Case(asked, None, problem=str(error))
    proof = prove(schedule) if asked.proved and len(mesh.survivors) <= MOST else None
    return Case(
        asked, schedule, seconds(schedule, size, asked.links), _intact(asked.shape, asked.algorithm, size, asked.links),
        traffic(schedule), proof,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _intact(shape: str, algorithm: str, size: float, links: Links) -> float:
    return seconds(plan(Mesh.parse(shape), algorithm, size, links), size, links)


def positions(shape: str, sizes: Sequence[str], every: int) -> Iterator[Hole]:
    """Holes of these sizes (`HxW`) at every so many rows and columns of a mesh, where they fit.

    sizes: without any, those of SIZES that fit. Raises UsageError for what is no size, or fits nowhere.
    """
    mesh = Mesh.parse(shape)
    usual = (each for each in SIZES if int(each[0]) < min(mesh.rows, mesh.columns))
    for text in sizes or usual:
        found = re.fullmatch(r"([1-9]\d{0,5})[xX]([1-9]\d{0,5})", text.strip())
        if found is None:
            raise UsageError(f"--hole {text!r}: give rows x columns of a hole, as 2x2")
        rows, columns = int(found[1]), int(found[2])
        if rows > mesh.rows or columns > mesh.columns or rows * columns == mesh.size:
            raise UsageError(f"--hole {text}: a mesh of {shape} has no room for it")
        places = itertools.product(range(0, mesh.rows - rows + 1, every), range(0, mesh.columns - columns + 1, every))
        yield from (Hole(rows, columns, row, column) for row, column in places)
