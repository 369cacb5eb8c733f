"""Forest: which neighbour each chip outside the rings hands its part of the vector to."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from flipper.mesh.chips import Mesh
from flipper.mesh.collectives import Trees


def forests(mesh: Mesh, members: Collection[int]) -> tuple[Trees, Trees]:
    """Trees by which all other survivors hang on members of rings: for one half of the vector, and for the other.

    The two share as few links as can be, since a link that carries both halves takes twice as long as those of a ring.
    To that end each half prefers every second column on the way up, and the others on the way down. The survivors must
    be connected.
    """
    inside = set(members)
    one = _forest(mesh, inside, 0, set())
    return one, _forest(mesh, inside, 1, set(one.links))


def _forest(mesh: Mesh, inside: set[int], half: int, used: set[tuple[int, int]]) -> Trees:
    """The cheapest ways to members (Dijkstra), by the cost of links; see _cost. used: links of the other half's."""
    hung: dict[int, tuple[int, int, int]] = {}
    waiting = [
        (_cost(mesh, chip, parent, half, used, True), 1, chip, parent, parent)
        for chip in mesh.survivors if chip not in inside
        for parent in mesh.linked[chip] if parent in inside
    ]  # fmt: skip
    heapq.heapify(waiting)
    while waiting:
        cost, depth, chip, parent, member = heapq.heappop(waiting)
        if chip in hung:
            continue
        hung[chip] = (parent, member, depth)
        for child in mesh.linked[chip]:
            if child not in inside and child not in hung:
                more = cost + _cost(mesh, child, chip, half, used, False)
                heapq.heappush(waiting, (more, depth + 1, child, chip, member))
    return Trees(hung)


def _cost(mesh: Mesh, chip: int, parent: int, half: int, used: set[tuple[int, int]], into_ring: bool) -> int:
    """Of a link: little, more where the other half prefers it, and most where that has it."""
    row, column = mesh.place(chip)
    along = parent - chip
    vertical = abs(along) == mesh.columns and mesh.columns > 1
    owner = (column if vertical else row) % 2 ^ (along > 0)
    dear = 4 * (mesh.rows + mesh.columns)
    cost = 2 + 2 * dear * ((chip, parent) in used)
    if owner != half:
        cost += dear if into_ring else 3 * vertical
    return cost
