"""Forest: which neighbour each chip outside the rings hands its part of the vector to."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from flipper.mesh.chips import Mesh
from flipper.mesh.collectives import Trees


def forests(mesh: Mesh, members: Collection[int]) -> tuple[Trees, Trees]:
    """Trees by which all other survivors hang on members of rings: for one half of the vector, and for the other.

    The two share as few links as can be, since a link that carries both halves takes twice as long as those of a ring.
    To that end each half prefers every second of the links that lead into rings. The survivors must be connected.
    """
    inside = set(members)
    used: set[tuple[int, int]] = set()
    found = []
    for half in (0, 1):
        trees = _forest(mesh, inside, half, used)
        used.update(trees.links)
        found.append(trees)
    return found[0], found[1]


def _forest(mesh: Mesh, inside: set[int], half: int, used: set[tuple[int, int]]) -> Trees:
    """Ways to the nearest members (Dijkstra): a link counts 1, and much more if the other half has it or prefers it."""
    dear = 2 * (mesh.rows + mesh.columns)
    hung: dict[int, tuple[int, int, int]] = {}
    waiting = []
    for chip in mesh.survivors:
        if chip not in inside:
            for parent in mesh.linked[chip]:
                if parent in inside:
                    other = sum(mesh.place(chip)) % 2 != half
                    cost = 1 + dear * other + 2 * dear * ((chip, parent) in used)
                    waiting.append((cost, 1, chip, parent, parent))
    heapq.heapify(waiting)
    while waiting:
        cost, depth, chip, parent, member = heapq.heappop(waiting)
        if chip in hung:
            continue
        hung[chip] = (parent, member, depth)
        for child in mesh.linked[chip]:
            if child not in inside and child not in hung:
                more = cost + 1 + 2 * dear * ((child, chip) in used)
                heapq.heappush(waiting, (more, depth + 1, child, chip, member))
    return Trees(hung)
