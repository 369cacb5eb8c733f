"""Study: what an allreduce costs on a mesh with holes, against the same mesh without."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from flipper.mesh.chips import Hole, Mesh
from flipper.mesh.cost import Links, seconds
from flipper.mesh.plan import plan
from flipper.mesh.proof import MOST, Proof, Traffic, prove, traffic
from flipper.mesh.schedule import Schedule


@dataclass(frozen=True)
class Case:
    """One schedule and what it comes to. seconds: on this mesh; intact_seconds: on the one without holes; proof: None
    where the mesh is too large for it."""

    holes: tuple[Hole, ...]
    schedule: Schedule
    size: float
    seconds: float
    intact_seconds: float
    traffic: Traffic
    proof: Proof | None

    @property
    def efficiency(self) -> float:
        """The intact mesh's share of throughput that is left to the allreduce."""
        return self.intact_seconds / self.seconds if self.seconds else 1.0

    def record(self) -> dict[str, object]:
        """The row that `flipper study mesh` prints."""
        mesh = self.schedule.mesh
        return {
            "shape": mesh.shape,
            "failed": [str(hole) for hole in self.holes],
            "survivors": len(mesh.survivors),
            "algorithm": self.schedule.algorithm,
            "variant": self.schedule.variant,
            "bytes": round(self.size),
            "steps": self.schedule.steps,
            "max_link_load": self.traffic.max_link_load,
            "conflicts": self.traffic.conflicts,
            "seconds": self.seconds,
            "intact_seconds": self.intact_seconds,
            "efficiency": self.efficiency,
            "verified": None if self.proof is None else self.proof.holds,
        }


def study(shape: str, holes: Sequence[Hole], algorithm: str, size: float, links: Links, proved: bool = True) -> Case:
    """Plan, prove and time one allreduce. size: bytes. Raises UsageError when the algorithm doesn't serve the mesh."""
    mesh = Mesh.parse(shape, holes)
    schedule = plan(mesh, algorithm, size, links)
    proof = prove(schedule) if proved and len(mesh.survivors) <= MOST else None
    return Case(
        tuple(holes), schedule, size, seconds(schedule, size, links), _intact(shape, algorithm, size, links),
        traffic(schedule), proof,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _intact(shape: str, algorithm: str, size: float, links: Links) -> float:
    return seconds(plan(Mesh.parse(shape), algorithm, size, links), size, links)
