"""Ring2d: the two-dimensional scheme, rings over rows or pairs of rows, then over columns.

In rows (or pairs of rows) that are whole the vectors are reduce-scattered round the row; then the chips at the same
place of each such ring allreduce their slices among themselves; then the sums are gathered round the rows. Survivors in
rows with a hole hang on the rings beside them. In place of rows there may be columns: then the mesh is transposed.

After S. Kumar, N. Jouppi, "Highly Available Data Parallel ML training on Mesh Networks", 2020, as far as its abstract
tells: "route gradient summation allreduce traffic around failed chips".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flipper.mesh.chips import Ints, Mesh, Route
from flipper.mesh.collectives import all_gather, reduce_scatter
from flipper.mesh.forest import forests
from flipper.mesh.routing import Load, around
from flipper.mesh.schedule import Lanes, Phase, Schedule, straight_links


@dataclass(frozen=True)
class Form:
    """One of the scheme's forms. rows: of a ring, 1 or 2; first: the first of them; turned: columns for rows."""

    rows: int
    first: int
    turned: bool

    def starts(self, mesh: Mesh) -> range:
        """The first rows of what would be rings on the intact mesh."""
        return range(self.first, mesh.rows - self.rows + 1, self.rows)

    def __str__(self) -> str:
        line = "column" if self.turned else "row"
        what = f"{line}s" if self.rows == 1 else f"{line} pairs"
        return f"{what} from {self.first}" if self.first else what


FORMS: Final = tuple(Form(rows, first, turned) for rows in (2, 1) for first in range(rows) for turned in (False, True))


def outside(mesh: Mesh, form: Form) -> int | None:
    """How many survivors are in no ring; None where there is none, since no row, or pair of rows, is whole."""
    seen = mesh.transposed if form.turned else mesh
    rings = len(_starts(seen, form))
    return len(seen.survivors) - rings * form.rows * seen.columns if rings else None


def ring2d(mesh: Mesh, form: Form) -> Schedule:
    """The schedule in one form, which must have a ring. The survivors must be connected."""
    seen = mesh.transposed if form.turned else mesh
    rings = _rings(seen, form)
    trees = forests(seen, set(rings.ravel().tolist()))
    lines, slices = len(rings), rings.shape[1]
    both = ((rings, 0, trees[0]), (rings[:, ::-1], slices * lines, trees[1]))
    columns = [_columns(way, base) for way, base, _ in both] if lines > 1 else []
    across = _column_routes(seen, rings)
    summing = [reduce_scatter(way, base, lines, tree) for way, base, tree in both]
    telling = [all_gather(way, base, lines, tree) for way, base, tree in both]
    phases = [Phase("rows, reduce-scatter", True, Lanes.joined(summing), {})]
    if columns:
        phases += [
            Phase("columns, reduce-scatter", True, Lanes.joined([reduce_scatter(w, b, 1) for w, b in columns]), across),
            Phase("columns, all-gather", False, Lanes.joined([all_gather(w, b, 1) for w, b in columns]), across),
        ]
    phases.append(Phase("rows, all-gather", False, Lanes.joined(telling), {}))
    hung = sorted({pair for tree in trees for pair in tree.links})
    count = len(trees[0].hung)
    variant = f"{form}, {lines} of {len(form.starts(seen))} whole" + (f", {count} chips hung on them" if count else "")
    found = Schedule(seen, "ring2d", variant, 2 * slices * lines, tuple(phase for phase in phases if len(phase.lanes)),
                     tuple(map(tuple, rings.tolist())), {}, tuple(hung))  # fmt: skip
    return _turned(found, mesh) if form.turned else found


def _rings(mesh: Mesh, form: Form) -> Ints:
    """The rings of rows, or pairs, without a hole, [rings, chips of each]."""
    first = np.arange(mesh.columns)
    ring = first[_line(mesh.columns)] if form.rows == 1 else np.concatenate([first, first[::-1] + mesh.columns])
    return np.array(_starts(mesh, form), dtype=np.int64)[:, None] * mesh.columns + ring


def _starts(mesh: Mesh, form: Form) -> list[int]:
    """The first rows of the rings."""
    whole = mesh.alive.reshape(mesh.rows, mesh.columns).min(axis=1).tolist()
    return [row for row in form.starts(mesh) if all(whole[row : row + form.rows])]


def _line(length: int) -> Ints:
    """A ring over chips in a line that crosses each link once in each direction: every second out, the others back."""
    places = np.arange(length)
    return np.concatenate([places[::2], places[1::2][::-1]])


def _columns(rings: Ints, base: int) -> tuple[Ints, Ints]:
    """Rings over the chips at the same place in each row's ring, and the first chunk of what each has summed."""
    lines, slices = rings.shape
    ways = rings[_line(lines)].T
    if base:  # the other half goes the other way round
        ways = ways[:, ::-1]
    return ways, base + (np.arange(slices) + 1) % slices * lines


def _column_routes(mesh: Mesh, rings: Ints) -> dict[tuple[int, int], Route]:
    """Ways round the hole for hops along columns that it blocks, in both directions."""
    if len(rings) == 1:
        return {}
    ways = rings[_line(len(rings))]
    source, target = ways.ravel(), np.roll(ways, -1, axis=0).ravel()
    failed = np.cumsum(~mesh.alive.reshape(mesh.rows, mesh.columns), axis=0).ravel()  # down each column
    blocked = failed[source] != failed[target]
    if not blocked.any():
        return {}
    one, other = source[~blocked], target[~blocked]
    links = straight_links(np.concatenate([one, other]), np.concatenate([other, one]), mesh.columns)[1]
    numbers, counts = np.unique(links, return_counts=True)
    load: Load = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    most = max(load.values(), default=1)
    routes: dict[tuple[int, int], Route] = {}
    for pair in zip(source[blocked].tolist(), target[blocked].tolist(), strict=True):
        route = around(mesh, *pair, load, most)
        routes[pair], routes[pair[::-1]] = route, route[::-1]
    return routes


def _turned(found: Schedule, mesh: Mesh) -> Schedule:
    """A schedule of the transposed mesh as one of the mesh itself."""

    def turn(chips: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chip % mesh.rows * mesh.columns + chip // mesh.rows for chip in chips)

    phases = []
    for phase in found.phases:
        lanes = phase.lanes
        source, target = found.mesh.transpose(lanes.source), found.mesh.transpose(lanes.target)
        turned = Lanes(source, target, lanes.base, lanes.offset, lanes.period, lanes.width, lanes.start, lanes.stop)
        routes = {}
        for route in phase.routes.values():
            way = turn(route)
            routes[way[0], way[-1]] = way
        phases.append(Phase(phase.name, phase.adds, turned, routes))
    return Schedule(mesh, found.algorithm, found.variant, found.chunks, tuple(phases), tuple(map(turn, found.rings)),
                    {}, tuple((a, b) for a, b in map(turn, found.hung)))  # fmt: skip
