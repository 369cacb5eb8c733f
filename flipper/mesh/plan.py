"""Plan: the schedule of an algorithm that takes least time on a mesh, among its forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flipper.errors import UsageError
from flipper.mesh.chips import Mesh
from flipper.mesh.cost import Links, seconds
from flipper.mesh.ring import rings
from flipper.mesh.ring2d import FORMS, ring2d
from flipper.mesh.schedule import Schedule

ALGORITHMS: Final = ("ring", "ring2d")
SIZE: Final = 100e6
"""Bytes of the vector, if nothing else is said."""

SMALL: Final = 256
"""Chips up to which all forms are tried."""


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
    served = False
    for form in FORMS:
        # Pairs come first. Rings of single rows share links, and take twice as long but for short vectors.
        if form.rows == 1 and served and mesh.size > SMALL:
            break
        found = ring2d(mesh, form)
        if found is not None:
            served = True
            yield found
    if not served:
        raise UsageError(
            f"ring2d serves no {mesh.shape} mesh of which each row and each column has a failed chip; "
            "--algorithm ring does"
        )
