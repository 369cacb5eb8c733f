"""Oracles for schedules: executed message by message on bags of names and on floats, without flipper's proof."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from flipper.mesh.chips import Mesh
from flipper.mesh.schedule import Phase, Schedule


@dataclass(frozen=True)
class Sent:
    """One message: chips as (row, column), the chunks in it, and the chips on its way."""

    source: tuple[int, int]
    target: tuple[int, int]
    chunks: tuple[int, ...]
    way: tuple[tuple[int, int], ...]


def place(mesh: Mesh, chip: int) -> tuple[int, int]:
    return chip // mesh.columns, chip % mesh.columns


def messages(schedule: Schedule) -> Iterator[tuple[Phase, list[Sent]]]:
    """Each step's messages, as the docstring of Lanes defines them."""
    mesh = schedule.mesh
    for phase in schedule.phases:
        lanes = phase.lanes
        columns = (lanes.source, lanes.target, lanes.base, lanes.offset, lanes.period, lanes.width, lanes.start,
                   lanes.stop)  # fmt: skip
        rows = list(zip(*(each.tolist() for each in columns), strict=True))
        for step in range(max((row[7] for row in rows), default=0)):
            sent = []
            for source, target, base, offset, period, width, start, stop in rows:
                if start <= step < stop:
                    first = base + width * ((offset - step) % period)
                    way = phase.routes.get((source, target)) or line(mesh, source, target)
                    sent.append(Sent(place(mesh, source), place(mesh, target), tuple(range(first, first + width)),
                                     tuple(place(mesh, chip) for chip in way)))  # fmt: skip
            yield phase, sent


def line(mesh: Mesh, source: int, target: int) -> tuple[int, ...]:
    (row, column), (down, right) = place(mesh, source), place(mesh, target)
    assert row == down or column == right, "neither in a row nor in a column, and no route given"
    if row == down:
        return tuple(range(source, target + (1 if target > source else -1), 1 if target > source else -1))
    return tuple(range(source, target + (1 if down > row else -1), mesh.columns if down > row else -mesh.columns))


def is_alive(mesh: Mesh, at: tuple[int, int]) -> bool:
    row, column = at
    return 0 <= row < mesh.rows and 0 <= column < mesh.columns and row * mesh.columns + column not in mesh.failed


def check_ways(schedule: Schedule) -> None:
    """Every message goes from neighbour to neighbour, over chips that live, from its source to its target."""
    for _, sent in messages(schedule):
        for each in sent:
            assert (each.way[0], each.way[-1]) == (each.source, each.target)
            assert all(is_alive(schedule.mesh, at) for at in each.way)
            assert all(abs(a - c) + abs(b - d) == 1 for (a, b), (c, d) in itertools.pairwise(each.way))


def loads(schedule: Schedule) -> tuple[int, int]:
    """The most messages over a link in one step, and the links of each phase that ever have two or more."""
    most, shared = 0, set()
    for phase, sent in messages(schedule):
        crossed = Counter(link for each in sent for link in itertools.pairwise(each.way))
        most = max(most, max(crossed.values(), default=0))
        shared |= {(phase.name, link) for link, times in crossed.items() if times > 1}
    return most, len(shared)


def summed_names(schedule: Schedule) -> dict[tuple[tuple[int, int], int], Counter[tuple[int, int]]]:
    """(chip, chunk) -> whose vectors its value holds, and how often, when all messages have been sent."""
    mesh = schedule.mesh
    chips = [place(mesh, chip) for chip in range(mesh.size) if chip not in mesh.failed]
    state = {(chip, chunk): Counter([chip]) for chip in chips for chunk in range(schedule.chunks)}
    for phase, sent in messages(schedule):
        arriving = [(each, chunk, state[each.source, chunk].copy()) for each in sent for chunk in each.chunks]
        for each, chunk, bag in arriving:
            state[each.target, chunk] = state[each.target, chunk] + bag if phase.adds else bag
    return state


def check_sum(schedule: Schedule) -> None:
    """Every survivor ends with every survivor's vector exactly once, in every chunk."""
    mesh = schedule.mesh
    all_once = Counter(place(mesh, chip) for chip in range(mesh.size) if chip not in mesh.failed)
    assert all(bag == all_once for bag in summed_names(schedule).values())


def summed_floats(schedule: Schedule, vectors: np.ndarray) -> np.ndarray:
    """The vectors of all survivors, [survivors, chunks], after the schedule, in float32."""
    order = {place(schedule.mesh, chip): rank for rank, chip in enumerate(schedule.mesh.survivors)}
    state = vectors.astype(np.float32).copy()
    for phase, sent in messages(schedule):
        arriving = [(each, state[order[each.source], list(each.chunks)].copy()) for each in sent]
        for each, brought in arriving:
            if phase.adds:
                state[order[each.target], list(each.chunks)] += brought
            else:
                state[order[each.target], list(each.chunks)] = brought
    return state


def connected(mesh: Mesh) -> bool:
    """Whether survivors reach each other, by flooding from one."""
    left = {place(mesh, chip) for chip in range(mesh.size) if chip not in mesh.failed}
    waiting = [left.pop()]
    while waiting:
        row, column = waiting.pop()
        near = {(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)} & left
        left -= near
        waiting += near
    return not left


def has_ring(mesh: Mesh) -> bool:
    """Whether some ring visits each survivor once by neighbours, by trying all ways (small meshes only)."""
    chips = {place(mesh, chip) for chip in range(mesh.size) if chip not in mesh.failed}
    if len(chips) < 4 or len(chips) % 2:  # neighbours differ in colour, as on a chessboard
        return False
    if 2 * sum((row + column) % 2 for row, column in chips) != len(chips):
        return False
    near: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for row, column in chips:
        near[row, column] = [at for at in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1))
                             if at in chips]  # fmt: skip
    start = min(chips, key=lambda chip: len(near[chip]))

    def goes_on(here: tuple[int, int], left: frozenset[tuple[int, int]]) -> bool:
        if not left:
            return start in near[here]
        if any(len(near[chip]) < 2 or not any(at in left or at in (here, start) for at in near[chip]) for chip in left):
            return False
        return any(goes_on(at, left - {at}) for at in near[here] if at in left)

    return goes_on(start, frozenset(chips - {start}))


@st.composite
def meshes(draw: st.DrawFn, most: int = 6) -> Mesh:
    """Meshes with holes, whose survivors are connected."""
    rows, columns = draw(st.integers(1, most)), draw(st.integers(1, most))
    size = rows * columns
    mesh = Mesh(rows, columns, frozenset(draw(st.sets(st.integers(0, size - 1), max_size=max(0, min(6, size - 1))))))
    assume(connected(mesh))
    return mesh
