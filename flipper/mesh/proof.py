"""Proof: a schedule executed on symbols, step by step: who has the sum of whose vectors.

What is kept of each chip and chunk is how many vectors its partial sum holds, and whether it still counts. At first
each chip counts with its own. Who sends its partial sum to be added counts no more; the receiver, who must still count,
then holds both. So those that count always part the survivors among themselves, and one that holds as many vectors as
there are survivors holds each exactly once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np

from flipper.mesh.chips import Ints, Mesh
from flipper.mesh.schedule import Phase, Schedule

MOST: Final = 4096
"""Survivors up to which schedules are proved: chunks x survivors are kept, some bytes each."""


@dataclass(frozen=True)
class Proof:
    """What was found. problem: the first thing that is wrong, None when all holds. links: see `traffic`."""

    problem: str | None

    @property
    def holds(self) -> bool:
        """Whether every survivor ends with every vector exactly once, by links between chips that live."""
        return self.problem is None


@dataclass(frozen=True)
class Traffic:
    """How links are shared. max_link_load: messages over one link in one direction in one step, at most. conflicts:
    links, of each phase, that ever carry two or more at once."""

    max_link_load: int
    conflicts: int


def prove(schedule: Schedule) -> Proof:
    """Execute the schedule on symbols. Takes survivors x chunks x 7 bytes; use it up to MOST survivors."""
    for phase in schedule.phases:
        if (problem := _impassable(phase, schedule.mesh)) is not None:
            return Proof(problem)
    return Proof(_executed(schedule))


def traffic(schedule: Schedule) -> Traffic:
    """Count the messages on each link."""
    most = conflicts = 0
    for phase in schedule.phases:
        lanes, links, _ = phase.crossings(schedule.mesh)
        worst = np.zeros(4 * schedule.mesh.size, dtype=np.int64)
        for begin, _ in phase.spans:
            on = np.zeros(len(phase.lanes), dtype=np.bool_)
            on[phase.working(begin)] = True
            np.maximum(worst, np.bincount(links[on[lanes]], minlength=len(worst)), out=worst)
        most = max(most, int(worst.max(initial=0)))
        conflicts += int(np.count_nonzero(worst > 1))
    return Traffic(most, conflicts)


def _impassable(phase: Phase, mesh: Mesh) -> str | None:
    """What is wrong with a lane's way: it must lead from neighbour to neighbour, all alive, from source to target."""
    alive = mesh.alive
    for (source, target), route in phase.routes.items():
        if (route[0], route[-1]) != (source, target):
            return f"{phase.name}: the way from chip {source} to {target} leads from {route[0]} to {route[-1]}"
        for here, there in itertools.pairwise(route):
            if there not in mesh.linked[here]:
                return f"{phase.name}: there is no link from chip {here} to {there}"
    try:
        lanes, _, chips = phase.crossings(mesh)
    except ValueError:
        return f"{phase.name}: a lane has no way"
    if not alive[phase.lanes.source].all() or not alive[chips].all():
        dead = chips[~alive[chips]]
        return f"{phase.name}: a message crosses the failed chip {int(dead[0]) if len(dead) else 'that sends it'}"
    last = np.full(len(phase.lanes), -1)
    last[lanes] = chips
    if (last != phase.lanes.target).any():
        return f"{phase.name}: a lane ends before its target"
    return None


def _executed(schedule: Schedule) -> str | None:
    mesh, total = schedule.mesh, len(schedule.mesh.survivors)
    rank = np.full(mesh.size, -1)
    rank[list(mesh.survivors)] = np.arange(total)
    state = _State(total, schedule.chunks)
    for phase in schedule.phases:
        source, target = rank[phase.lanes.source], rank[phase.lanes.target]
        widths = np.unique(phase.lanes.width)
        if len(widths) > 1:
            return f"{phase.name}: messages of {widths.min()} to {widths.max()} chunks, where all must be of one length"
        for step in range(phase.steps):
            on = phase.working(step)
            which = phase.lanes.chunk(step)[on, None] + np.arange(int(widths[0]))
            sent, met = source[on, None] * schedule.chunks + which, target[on, None] * schedule.chunks + which
            problem = state.add(sent, met) if phase.adds else state.put(sent, met)
            if problem:
                return f"{phase.name}, step {step}: {problem}"
    whole = (state.holds == total).reshape(total, schedule.chunks).all(axis=1)
    return None if whole.all() or total == 1 else f"{np.count_nonzero(~whole)} survivors end without the whole sum"


class _State:
    """What each survivor has of each chunk, [survivors * chunks]; messages of a step name places in it.

    holds: how many vectors its partial sum has. counts: whether it still counts.
    """

    def __init__(self, survivors: int, chunks: int) -> None:
        self.total = survivors
        self.holds = np.ones(survivors * chunks, dtype=np.int16)
        self.counts = np.ones(survivors * chunks, dtype=np.bool_)
        self._mark = np.zeros(survivors * chunks, dtype=np.int32)

    def add(self, sent: Ints, met: Ints) -> str | None:
        """Messages whose content is added; what is wrong with them."""
        if not self.counts[sent].all():
            return "a chip sends a sum to be added that it has passed on already"
        brought = self.holds[sent]
        self.counts[sent] = False
        if self._repeats(sent):
            return "a chip sends the same sum twice in one step"
        if not self.counts[met].all():
            return "a chip adds to a sum that it has passed on"
        if self._repeats(met):  # several arrive at one place
            np.add.at(self.holds, met, brought)
        else:
            self.holds[met] += brought
        return None

    def put(self, sent: Ints, met: Ints) -> str | None:
        """Messages whose content takes the place of what is there."""
        if not (self.holds[sent] == self.total).all():
            return "a chip sends on a sum that it hasn't got whole"
        self.holds[met] = self.total
        return None

    def _repeats(self, places: Ints) -> bool:
        """Whether a place is named twice: then what was written to it first is gone."""
        number = np.arange(places.size, dtype=np.int32).reshape(places.shape)
        self._mark[places] = number
        return not np.array_equal(self._mark[places], number)
