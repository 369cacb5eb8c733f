"""Schedule: who sends which part of the vector to whom in each step, and by which links."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from flipper.mesh.chips import Ints, Mesh, Route


@dataclass(frozen=True)
class Lanes:
    """What one chip keeps sending to another one: a message in each of the steps start to stop - 1, all of them [n].

    In step g the message holds `width` chunks from base + width * ((offset - g) mod period).
    """

    source: Ints
    target: Ints
    base: Ints
    offset: Ints
    period: Ints
    width: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, *columns: object) -> Lanes:
        """From values that broadcast to one shape, in the order of the fields."""
        wide = np.broadcast_arrays(*(np.asarray(each, dtype=np.int64) for each in columns))
        return cls(*(np.ascontiguousarray(each).reshape(-1) for each in wide))

    @classmethod
    def none(cls) -> Lanes:
        """No lane."""
        return cls(*(np.zeros(0, dtype=np.int64) for _ in fields(cls)))

    @classmethod
    def joined(cls, parts: Sequence[Lanes]) -> Lanes:
        """All lanes of several."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def __len__(self) -> int:
        return len(self.source)

    def chunk(self, step: int) -> Ints:
        """The first chunk of each lane's message, [n]."""
        return self.base + self.width * ((self.offset - step) % self.period)


@dataclass(frozen=True)
class Phase:
    """Steps in which all lanes add what they bring to what is there, or all put it in its place.

    routes: (source, target) -> the way, where it isn't straight along a row or a column.
    """

    name: str
    adds: bool
    lanes: Lanes
    routes: Mapping[tuple[int, int], Route]

    @property
    def steps(self) -> int:
        """How many there are."""
        return int(self.lanes.stop.max(initial=0))

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(first step, one past the last), within which the same lanes are at work."""
        cuts = sorted({0, *self.lanes.start.tolist(), *self.lanes.stop.tolist()})
        return list(itertools.pairwise(cuts))

    def working(self, step: int) -> Ints:
        """The lanes that send in this step, by number."""
        return np.flatnonzero((self.lanes.start <= step) & (step < self.lanes.stop))

    def crossings(self, mesh: Mesh) -> tuple[Ints, Ints, Ints]:
        """Each link that each lane crosses: the lane's number, the link's, and the chip that it leads to.

        A link's number is that of the chip that it leaves, times 4, and its direction (see STEPS). Sorted by lane.
        """
        bent, routes = [], []
        for lane, pair in enumerate(zip(self.lanes.source.tolist(), self.lanes.target.tolist(), strict=True)):
            if pair in self.routes:
                bent.append(lane)
                routes.append(self.routes[pair])
        apart = np.zeros(len(self.lanes), dtype=np.bool_)
        apart[bent] = True
        straight = np.flatnonzero(~apart)
        lanes, links, chips = straight_links(self.lanes.source[straight], self.lanes.target[straight], mesh.columns)
        turns = mesh.turns
        ways = [4 * one + turns[other - one] for route in routes for one, other in itertools.pairwise(route)]
        passed = [chip for route in routes for chip in route[1:]]
        numbers = np.repeat(np.array(bent, dtype=np.int64), [len(route) - 1 for route in routes])
        return (
            np.concatenate([straight[lanes], numbers]),
            np.concatenate([links, np.array(ways, dtype=np.int64)]),
            np.concatenate([chips, np.array(passed, dtype=np.int64)]),
        )


@dataclass(frozen=True)
class Schedule:
    """An allreduce: after its phases every survivor has the sum of all vectors.

    algorithm: "ring" or "ring2d"; variant: in words, which of its forms. chunks: equal parts of the vector.
    rings: closed ways over chips that the data goes round, for pictures. hung: chip -> those that it passes its own
    part to, in the place of a ring.
    """

    mesh: Mesh
    algorithm: str
    variant: str
    chunks: int
    phases: tuple[Phase, ...]
    rings: tuple[tuple[int, ...], ...] = ()
    ring_routes: Mapping[tuple[int, int], Route] | None = None
    hung: tuple[tuple[int, int], ...] = ()

    @property
    def steps(self) -> int:
        """Of all phases."""
        return sum(phase.steps for phase in self.phases)

    def detours(self) -> Iterator[Route]:
        """The ways that are longer than they would be on the intact mesh."""
        seen = set()
        for phase in self.phases:
            pairs = set(zip(phase.lanes.source.tolist(), phase.lanes.target.tolist(), strict=True))
            for pair, route in phase.routes.items():
                if pair in pairs and pair not in seen and len(route) - 1 > distance(self.mesh, *pair):
                    seen.add(pair)
                    yield route


def distance(mesh: Mesh, one: int, other: int) -> int:
    """Links between two chips on the intact mesh."""
    (row, column), (down, right) = mesh.place(one), mesh.place(other)
    return abs(row - down) + abs(column - right)


def straight_links(source: Ints, target: Ints, columns: int) -> tuple[Ints, Ints, Ints]:
    """What straight ways cross, along a row or else down a column; as Phase.crossings. columns: of the mesh.

    Raises ValueError for a pair that is in neither.
    """
    row, column = np.divmod(source, columns)
    down, right = np.divmod(target, columns)
    down, right = down - row, right - column
    if ((down != 0) & (right != 0)).any():
        raise ValueError("two chips that are neither in a row nor in a column need a route")
    length = np.abs(down) + np.abs(right)
    direction = np.select([right > 0, right < 0, down > 0], [0, 1, 2], 3)
    stride = np.sign(down) * columns + np.sign(right)
    lanes, links, chips = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for hop in range(int(length.max(initial=0))):
        on = np.flatnonzero(length > hop)
        at = source[on] + hop * stride[on]
        lanes.append(on)
        links.append(4 * at + direction[on])
        chips.append(at + stride[on])
    return np.concatenate(lanes), np.concatenate(links), np.concatenate(chips)
