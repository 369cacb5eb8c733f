"""Cost: how long a schedule takes by a model of the links.

Steps go in lockstep. A message takes the latency of each link on its way, and then as long as the busiest of its links
takes for all the bytes that cross it in that step in its direction; a link has its full bandwidth in either direction,
and chips pass on what isn't for them without delay to their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flipper.errors import UsageError
from flipper.mesh.schedule import Phase, Schedule

BANDWIDTH: Final = 70e9
LATENCY: Final = 1e-6


@dataclass(frozen=True)
class Links:
    """What a link does. bandwidth: bytes per second in each direction; latency: seconds. Round numbers by default, of
    no machine in particular."""

    bandwidth: float = BANDWIDTH
    latency: float = LATENCY

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < float("inf"):
            raise UsageError(f"--link-bandwidth {self.bandwidth:g}: give bytes per second, above 0")
        if not 0 <= self.latency < float("inf"):
            raise UsageError(f"--link-latency {self.latency:g}: give seconds, 0 or more")


def seconds(schedule: Schedule, size: float, links: Links) -> float:
    """How long the allreduce takes. size: bytes of the vector."""
    return sum(phase_seconds(phase, schedule, size, links) for phase in schedule.phases)


def phase_seconds(phase: Phase, schedule: Schedule, size: float, links: Links) -> float:
    """How long one phase takes, its steps one after another."""
    lanes, crossed, _ = phase.crossings(schedule.mesh)
    hops = np.bincount(lanes, minlength=len(phase.lanes))
    chunk = size / schedule.chunks
    total = 0.0
    for begin, end in phase.spans:
        on = phase.working(begin)
        if not len(on):
            continue
        bytes_sent = np.zeros(len(phase.lanes))
        bytes_sent[on] = phase.lanes.width[on] * chunk
        busiest = float(np.bincount(crossed, weights=bytes_sent[lanes]).max())
        total += (end - begin) * (links.latency * int(hops[on].max()) + busiest / links.bandwidth)
    return total
