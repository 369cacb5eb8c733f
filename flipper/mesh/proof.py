"""Proof: a schedule executed on symbols, step by step: who has the sum of whose vectors.

What is kept of each chip and chunk is how many vectors its partial sum holds, and whether it still counts. At first
each chip counts with its own. Who sends its partial sum to be added counts no more; the receiver, who must still count,
then holds both. So those that count always part the survivors among themselves, and one that holds as many vectors as
there are survivors holds each exactly once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flipper.mesh.chips import Mesh
from flipper.mesh.schedule import Phase, Schedule

Array = np.ndarray[Any, Any]

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
    """Execute the schedule on symbols. Takes survivors x chunks x 3 bytes; use it up to MOST survivors."""
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
    holds = np.ones((total, schedule.chunks), dtype=np.int16)
    counts = np.ones((total, schedule.chunks), dtype=np.bool_)
    for phase in schedule.phases:
        source, target = rank[phase.lanes.source], rank[phase.lanes.target]
        for step in range(phase.steps):
            on = phase.working(step)
            chunk, width = phase.lanes.chunk(step)[on], phase.lanes.width[on]
            for wide in np.unique(width).tolist():
                of = on[width == wide]
                which = chunk[width == wide][:, None] + np.arange(wide)
                take = _add if phase.adds else _put
                problem = take(holds, counts, source[of][:, None], target[of][:, None], which, total)
                if problem:
                    return f"{phase.name}, step {step}: {problem}"
    if total > 1 and not (holds == total).all():
        return f"{int(np.count_nonzero((holds != total).any(axis=1)))} survivors end without the whole sum"
    return None


def _add(holds: Array, counts: Array, source: Array, target: Array, which: Array, total: int) -> str | None:
    if not counts[source, which].all():
        return "a chip sends a sum to be added that it has passed on already"
    brought = holds[source, which]
    counts[source, which] = False
    if _twice(source, which, counts.shape[1]):
        return "a chip sends the same sum twice in one step"
    if not counts[target, which].all():
        return "a chip adds to a sum that it has passed on"
    np.add.at(holds, (np.broadcast_to(target, which.shape), which), brought)
    return None


def _put(holds: Array, counts: Array, source: Array, target: Array, which: Array, total: int) -> str | None:
    if not (holds[source, which] == total).all():
        return "a chip sends on a sum that it hasn't got whole"
    holds[target, which] = total
    return None


def _twice(source: Array, which: Array, chunks: int) -> bool:
    keys = (source * chunks + which).ravel()
    return len(np.unique(keys)) != len(keys)
