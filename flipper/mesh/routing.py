"""Routing: ways round failed chips that keep off links that are busy."""

from __future__ import annotations

import heapq
import itertools

from flipper.mesh.chips import Mesh, Route

Load = dict[int, int]
"""A link's number (see Phase.crossings) -> how many ways cross it already."""


def around(mesh: Mesh, source: int, target: int, load: Load, most: int) -> Route:
    """A short way by chips that live (A*): a link that carries `most` ways or more already counts for several.

    The two must be connected. Adds the way, and the way back, to the load.
    """
    width, turns = mesh.columns, mesh.turns
    goal_row, goal_column = divmod(target, width)
    came: dict[int, int] = {}
    waiting = [(0, 0, 0, source, source)]  # of equal sums, those nearest to the target first
    while waiting:
        _, _, cost, chip, last = heapq.heappop(waiting)
        if chip in came:
            continue
        came[chip] = last
        if chip == target:
            break
        for there in mesh.linked[chip]:
            if there not in came:
                more = cost + 1 + max(0, load.get(4 * chip + turns[there - chip], 0) - most + 1)
                left = abs(there // width - goal_row) + abs(there % width - goal_column)
                heapq.heappush(waiting, (more + left, left, more, there, chip))
    route = [target]
    while route[-1] != source:
        route.append(came[route[-1]])
    route.reverse()
    for one, other in itertools.pairwise(route):
        for number in (4 * one + turns[other - one], 4 * other + turns[one - other]):
            load[number] = load.get(number, 0) + 1
    return tuple(route)
