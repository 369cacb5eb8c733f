"""Plan: the schedule of an algorithm that takes least time on a mesh, among its forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flipper.errors import UsageError
from flipper.mesh.chips import Mesh
from flipper.mesh.cost import Links, seconds
from flipper.mesh.ring import rings
from flipper.mesh.ring2d import FORMS, outside, ring2d
from flipper.mesh.schedule import Schedule

ALGORITHMS: Final = ("ring", "ring2d")
SIZE: Final = 100e6
"""Bytes of the vector, if nothing else is said."""

SMALL: Final = 256
"""Chips up to which all forms are tried."""
TRIED: Final = 4
"""Forms of larger meshes."""


def plan(mesh: Mesh, algorithm: str, size: float = SIZE, links: Links | None = None) -> Schedule:
    """The form that takes least time by the cost model.

    size: bytes of the vector. Raises UsageError when the algorithm serves no such mesh.
    """
    links = links or Links()
    found = list(forms(mesh, algorithm))
    return min(found, key=lambda schedule: seconds(schedule, size, links))


def forms(mesh: Mesh, algorithm: str) -> Iterator[Schedule]:
    """The algorithm's schedules, one for each form that serves the mesh. Raises UsageError when none does."""
    if algorithm not in ALGORITHMS:
        raise UsageError(f"no algorithm {algorithm!r}; known: {', '.join(ALGORITHMS)}")
    if algorithm == "ring":
        yield from rings(mesh)
        return
    mesh.refuse_parts()
    served = [form for form in FORMS if outside(mesh, form) is not None]
    if mesh.size > SMALL:
        # Rings of single rows share links, and take twice as long but for short vectors. The more chips hang on rings,
        # the fewer share the work.
        served = sorted(served, key=lambda form: (-form.rows, outside(mesh, form)))[:TRIED]
    for form in served:
        yield ring2d(mesh, form)
    if not served:
        raise UsageError(
            f"ring2d serves no {mesh.shape} mesh of which each row and each column has a failed chip; "
            "--algorithm ring does"
        )
