"""Ring: the one-dimensional scheme, a single ring over all survivors, walked in both directions at once.

Where there is no ring whose hops are all to neighbours (an odd number of chips of a mesh has none), two forms are left:
longer hops, by links that the other direction uses, too; or a ring over most survivors, on which the others hang.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flipper.mesh.chips import Ints, Mesh, Route
from flipper.mesh.collectives import Trees, all_gather, reduce_scatter
from flipper.mesh.cycle import Cycle, cycle
from flipper.mesh.forest import forests
from flipper.mesh.schedule import Lanes, Phase, Schedule


def rings(mesh: Mesh) -> Iterator[Schedule]:
    """The schedule in each of its forms: half of the vector goes round one way, half the other.

    Raises UsageError: survivors are cut off from others.
    """
    found = cycle(mesh)
    yield _through_all(mesh, found)
    if found.long_hops and len(found.core) > 2:
        yield _with_trees(mesh, found)


def _through_all(mesh: Mesh, found: Cycle) -> Schedule:
    n, long = len(found.chips), found.long_hops
    routes: dict[tuple[int, int], Route] = {}
    for route in found.routes:
        if len(route) > 2:
            routes[route[0], route[-1]] = route
            routes[route[-1], route[0]] = route[::-1]
    variant = "every hop to a neighbour" if not long else f"{long} of {n} hops over several links"
    phases = _phases(np.array([found.chips], dtype=np.int64), (Trees(), Trees()), routes)
    return Schedule(mesh, "ring", variant, 2 * n, phases, (found.chips,), routes)


def _with_trees(mesh: Mesh, found: Cycle) -> Schedule:
    n = len(found.core)
    trees = forests(mesh, found.core)
    hung = sorted({pair for tree in trees for pair in tree.links})
    variant = f"{n} chips in a ring, {len(mesh.survivors) - n} hung on it"
    phases = _phases(np.array([found.core], dtype=np.int64), trees, {})
    return Schedule(mesh, "ring", variant, 2 * n, phases, (found.core,), {}, tuple(hung))


def _phases(order: Ints, trees: tuple[Trees, Trees], routes: dict[tuple[int, int], Route]) -> tuple[Phase, ...]:
    n = order.shape[1]
    both = ((order, 0, trees[0]), (order[:, ::-1], n, trees[1]))
    phases = (
        Phase("reduce-scatter", True, Lanes.joined([reduce_scatter(way, base, 1, tree) for way, base, tree in both]),
              routes),
        Phase("all-gather", False, Lanes.joined([all_gather(way, base, 1, tree) for way, base, tree in both]), routes),
    )  # fmt: skip
    return tuple(phase for phase in phases if len(phase.lanes))
