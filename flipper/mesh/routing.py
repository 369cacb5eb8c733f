"""Routing: ways round failed chips that keep off links that are busy."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

from flipper.mesh.chips import Mesh, Route

Load = Counter[tuple[int, int]]
"""(chip, neighbour) -> how many ways cross that link already."""


def straight(mesh: Mesh, source: int, target: int) -> Route | None:
    """The chips along the row or column that both are in; None where one of them has failed."""
    (row, column), (down, right) = mesh.place(source), mesh.place(target)
    stride = (down > row) - (down < row), (right > column) - (right < column)
    step = stride[0] * mesh.columns + stride[1]
    route = (*tuple(range(source, target, step)), target) if step else (source,)
    return route if all(mesh.alive[chip] for chip in route) else None


def around(mesh: Mesh, source: int, target: int, load: Load, worst: int) -> Route:
    """The shortest way by chips that live (A*); of links that carry `worst` ways already it keeps off, if it can.

    The two must be connected. Adds the way to the load.
    """
    goal = mesh.place(target)

    def left(chip: int) -> int:
        row, column = mesh.place(chip)
        return abs(row - goal[0]) + abs(column - goal[1])

    reached: dict[int, tuple[float, int]] = {}
    waiting: list[tuple[float, float, int, int]] = [(left(source), 0.0, source, source)]
    while waiting:
        _, cost, chip, came = heapq.heappop(waiting)
        if chip in reached:
            continue
        reached[chip] = (cost, came)
        if chip == target:
            break
        for there in mesh.linked[chip]:
            if there not in reached:
                busy = max(0, load[chip, there] - worst + 1)
                more = cost + 1 + 2 * busy
                heapq.heappush(waiting, (more + left(there), more, there, chip))
    route = [target]
    while route[-1] != source:
        route.append(reached[route[-1]][1])
    route.reverse()
    load.update(itertools.pairwise(route))
    return tuple(route)
