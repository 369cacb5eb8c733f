"""Allreduce: how the gradients of all replicas are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flipper.errors import UsageError
from flipper.training.layouts import Parallel

if TYPE_CHECKING:  # the planner is loaded where a mesh is asked for
    from flipper.mesh.allreduce import MeshAllreduce


@dataclass(frozen=True)
class Allreduce:
    """native: as the backend does it. mesh: by a schedule for the chips of a mesh. Without either: in rank order."""

    native: bool = False
    mesh: MeshAllreduce | None = None

    @classmethod
    def parse(cls, text: str, failed: Sequence[str], parallel: Parallel) -> Allreduce:
        """Read "ordered", "native" or `mesh:RxC[:ALGORITHM]`. Raises UsageError, also where the layout doesn't fit."""
        if text in ("ordered", "native"):
            if failed:
                raise UsageError("--failed says which chips of a mesh have failed: give --allreduce mesh:RxC, too")
            return cls(native=text == "native")
        from flipper.mesh.allreduce import MeshAllreduce

        mesh = MeshAllreduce.parse(text, failed)
        if parallel.data != "ddp" or parallel.model is not None:
            raise UsageError(f"--allreduce {text} works under ddp:{mesh.ranks}, not under {parallel}")
        if parallel.ranks != mesh.ranks:
            raise UsageError(
                f"--allreduce {text}: {mesh.ranks} of its {mesh.mesh.size} chips live, and {parallel} has "
                f"{parallel.ranks} ranks; give --parallel ddp:{mesh.ranks}"
            )
        mesh.schedule()  # refused now, and not by all ranks
        return cls(mesh=mesh)


ORDERED = Allreduce()
"""The sum in rank order."""
