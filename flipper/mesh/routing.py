"""Routing: ways round failed chips that keep off links that are busy."""

from __future__ import annotations

import heapq
import itertools

from flipper.mesh.chips import Mesh, Route

Load = dict[tuple[int, int], int]
"""(chip, neighbour) -> how many ways cross that link already."""


def around(mesh: Mesh, source: int, target: int, load: Load, most: int) -> Route:
    """A short way by chips that live (A*): a link that carries `most` ways or more already counts for several.

    The two must be connected. Adds the way, and the way back, to the load.
    """
    width = mesh.columns
    goal_row, goal_column = divmod(target, width)
    came: dict[int, int] = {}
    waiting: list[tuple[int, int, int, int]] = [(0, 0, source, source)]
    while waiting:
        _, cost, chip, last = heapq.heappop(waiting)
        if chip in came:
            continue
        came[chip] = last
        if chip == target:
            break
        for there in mesh.linked[chip]:
            if there not in came:
                more = cost + 1 + max(0, load.get((chip, there), 0) - most + 1)
                left = abs(there // width - goal_row) + abs(there % width - goal_column)
                heapq.heappush(waiting, (more + left, more, there, chip))
    route = [target]
    while route[-1] != source:
        route.append(came[route[-1]])
    route.reverse()
    count(load, route)
    count(load, route[::-1])
    return tuple(route)


def count(load: Load, route: list[int]) -> None:
    """Add a way to the load."""
    for pair in itertools.pairwise(route):
        load[pair] = load.get(pair, 0) + 1
