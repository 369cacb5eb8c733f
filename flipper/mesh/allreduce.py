"""Allreduce: what `--allreduce mesh:RxC` and `--failed` ask for, and the schedule for those that are left."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flipper.errors import UsageError
from flipper.mesh.chips import Mesh
from flipper.mesh.plan import ALGORITHMS, plan
from flipper.mesh.schedule import Schedule


@dataclass(frozen=True)
class MeshAllreduce:
    """Ranks as the chips of a mesh that live, row by row. algorithm: of ALGORITHMS; None takes ring2d where that serves
    the mesh, and ring elsewhere."""

    mesh: Mesh
    algorithm: str | None = None

    @classmethod
    def parse(cls, text: str, failed: Sequence[str] = ()) -> MeshAllreduce:
        """Read `mesh:RxC` or `mesh:RxC:ALGORITHM`, with holes as Hole.parse reads them. Raises UsageError."""
        kind, _, rest = text.partition(":")
        shape, colon, algorithm = rest.partition(":")
        if kind != "mesh" or (colon and algorithm not in ALGORITHMS):
            known = " or ".join(ALGORITHMS)
            raise UsageError(f"--allreduce {text!r}: give ordered, native, mesh:RxC or mesh:RxC:{known}")
        return cls(Mesh.parse(shape, failed), algorithm or None)

    @property
    def ranks(self) -> int:
        """How many there are at first."""
        return len(self.mesh.survivors)

    def schedule(self, ranks: Collection[int] | None = None) -> Schedule:
        """The schedule for these ranks, by their numbers at first; all without them. The others' chips count as failed.

        Raises UsageError when the mesh isn't served.
        """
        mesh = self.mesh
        if ranks is not None:
            mesh = mesh.without(chip for rank, chip in enumerate(mesh.survivors) if rank not in ranks)
        if self.algorithm is not None:
            return plan(mesh, self.algorithm)
        try:
            return plan(mesh, "ring2d")
        except UsageError:
            return plan(mesh, "ring")
