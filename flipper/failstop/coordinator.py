"""The launching process's part: who is left, and what each survivor does next."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Final

from flipper.errors import HangError, TrainingError
from flipper.failstop.messages import BETWEEN, MET, Dying, Joined, Lost, Plan, Ready, allow
from flipper.failstop.spec import FailstopSpec
from flipper.training.launch import GRACE_SECONDS, Ranks
from flipper.training.ranks import Failure
from flipper.training.spec import Event

LOOK_SECONDS: Final = 0.2
"""Between looks at ranks that say nothing."""


class RankLost(Exception):
    """A rank died, and the run is to be restarted. rank: which; step: the one under way; seconds: until noticed."""

    def __init__(self, rank: int, step: int, seconds: float) -> None:
        super().__init__(rank, step, seconds)
        self.rank, self.step, self.seconds = rank, step, seconds


@dataclass
class Coordinator:
    """Follows the ranks of one launch until all that are left have ended.

    alive: ranks, by their numbers at the start. died: when each lost one died. untold: those of which no plan knows.
    stage: "running", "losing" until all that are left have told of the loss, "readying" until all have read the plan,
    "joining" until all are in the new group. since: when that stage began.
    """

    ranks: Ranks
    job: FailstopSpec
    on_event: Callable[[Event], None]
    step: int = 0
    generation: int = 0
    stage: str = "running"
    since: float = 0.0
    alive: set[int] = field(default_factory=set)
    died: dict[int, float] = field(default_factory=dict)
    untold: set[int] = field(default_factory=set)
    reports: dict[int, Lost] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    detected: float = 0.0

    def follow(self) -> None:
        """Until every survivor is done. Raises RankLost under "restart", else the FlipperError that ends the run."""
        at = dict(enumerate(self.ranks.connections))
        self.alive, done = set(at), False
        heard = time.monotonic()
        while at:
            ready = wait(list(at.values()), LOOK_SECONDS)
            heard = time.monotonic() if ready else heard
            for rank, connection in list(at.items()):
                if connection in ready:
                    message = _received(connection)
                    if message in ("done", None):
                        del at[rank]
                    done = done or message == "done"
                    if message is None and not done:  # once one is done all are, and nothing can be lost
                        self._note_death(rank)
                    elif message != "done":
                        self._take(rank, message)
            if not done:
                self._go_on(time.monotonic() - heard)

    def _take(self, rank: int, message: object) -> None:
        match message:
            case dict():
                self.step = message["step"] if message["event"] == "step" else self.step
                self.on_event(message)
            case Dying(time=when):
                self.died[rank] = when
            case Lost(generation=generation) if generation == self.generation:
                self.reports[rank] = message
                if self.stage in ("running", "joining"):
                    self.detected = self.detected or message.time
                    self._enter("losing")
            case Ready(generation=generation) if generation == self.generation and self.stage == "readying":
                self.there.add(rank)
            case Joined(generation=generation) if generation == self.generation and self.stage == "joining":
                self.there.add(rank)
            case Failure():
                raise self.ranks.cause({rank: message})

    def _note_death(self, rank: int) -> None:
        now = time.monotonic()
        self.died.setdefault(rank, now)
        self.alive.discard(rank)
        self.reports.pop(rank, None)
        self.untold.add(rank)
        if self.job.recovery == "restart":
            raise RankLost(rank, self.step + 1, now - self.died[rank])
        if len(self.alive) < self.job.min_ranks:
            lost = ", ".join(map(str, sorted(self.died)))
            raise TrainingError(
                f"rank {lost} died, and {len(self.alive)} of {len(self.ranks.processes)} ranks are left: "
                f"fewer than --min-ranks {self.job.min_ranks}"
            )
        if self.stage == "readying":
            self._plan()

    def _go_on(self, silence: float) -> None:
        if self.stage == "running":
            if silence > self.job.train.timeout + GRACE_SECONDS:
                raise HangError(f"no rank gave a sign; ended after {silence:g} s of silence (--timeout sets how long)")
        elif self.stage == "losing":
            if self.alive <= set(self.reports):
                if self.untold:
                    self._plan()
                elif self._late(GRACE_SECONDS):
                    raise TrainingError(f"ranks lost contact, and none has died: {self._first.error}")
            else:
                self._fence(self.alive - set(self.reports), self.job.train.timeout + GRACE_SECONDS)
        elif self.alive <= self.there:
            self._all_there()
        else:
            self._fence(self.alive - self.there, self.job.train.timeout + GRACE_SECONDS)

    def _all_there(self) -> None:
        if self.stage == "readying":
            self.reports.clear()  # who can't join reports anew
            self._enter("joining")
            allow(self.ranks.place, self.generation)
            return
        seconds = time.monotonic() - self.detected
        self.on_event({
            "event": "recovered", "strategy": self.job.recovery, "world_size": len(self.alive), "seconds": seconds
        })  # fmt: skip
        self.detected = 0.0
        self._enter("running")

    def _enter(self, stage: str) -> None:
        self.stage, self.since = stage, time.monotonic()
        self.there.clear()

    def _late(self, seconds: float) -> bool:
        return time.monotonic() - self.since > seconds

    @property
    def _first(self) -> Lost:
        return min(self.reports.values(), key=lambda report: report.time)

    def _fence(self, tardy: set[int], seconds: float) -> None:
        """Kill ranks that are stopped, or give no sign for so long: a rank that comes back must find itself dead."""
        for rank in tardy:
            if self._late(seconds) or self.ranks.is_stopped(rank):
                self.died.setdefault(rank, time.monotonic())
                pid = self.ranks.processes[rank].pid
                with suppress(ProcessLookupError):
                    os.kill(pid or 0, signal.SIGKILL)

    def _plan(self) -> None:
        """Tell the survivors, who all have told where they are, how they go on."""
        step = max(report.completed for report in self.reports.values()) + 1
        for rank in sorted(self.untold):
            seconds = max(0.0, self.detected - self.died[rank])
            self.on_event({"event": "rank-lost", "rank": rank, "step": step, "seconds_to_detect": seconds})
        self.untold.clear()
        self.generation += 1
        self._enter("readying")
        plan_of(self.generation, self.job.recovery, self.reports).write(self.ranks.place)


def plan_of(generation: int, recovery: str, reports: Mapping[int, Lost]) -> Plan:
    """What each survivor does, given where it is.

    All meet before a step and after what is done between steps, so that they are apart by one such part at most:
    - some had all buckets of a step but not yet its loss, while others had that, too: it is done, with their result;
    - some were doing a thing between steps: all do it again, but for those that had met after an earlier one;
    - some had not met for the step under way, so that no bucket of it is averaged: all do the step anew;
    - else all are in the midst of a step, and the recovery says what becomes of it.
    """
    ranks = tuple(sorted(reports))
    completed = max(report.completed for report in reports.values())
    behind = {rank for rank in ranks if reports[rank].completed < completed}
    phases = {rank: reports[rank].phase for rank in ranks if rank not in behind}
    inside = [phase for phase in phases.values() if phase not in _PLACES]
    latest = max((_PLACES[phase] for phase in phases.values() if phase in _PLACES), default=(0, True))
    working = bool(behind) or any(_PLACES.get(phase) == (latest[0], False) for phase in phases.values())
    midst = not behind and len(inside) == len(phases) and "meet" not in inside

    def action(rank: int) -> str:
        if rank in behind:
            return "done"
        if phases[rank] in _PLACES:
            return "again" if working and not inside and _PLACES[phases[rank]][0] == latest[0] else "on"
        return "finish" if recovery == "lossy" and midst else "redo"

    donors: dict[int, int] = {}
    if midst:
        for number, rank in reversed(list(enumerate(ranks))):
            donors.update(dict.fromkeys(reports[rank].done, number))
    result = next((reports[rank].result for rank in ranks if rank not in behind), None)
    return Plan(generation, ranks, tuple(map(action, ranks)), donors, result)


_PLACES: Final = {
    phase: (number, met) for number, work in enumerate(BETWEEN) for phase, met in ((work, False), (MET[work], True))
}
"""Phase between steps -> its place in their order, and whether it is the meeting after."""


def _received(connection: Connection) -> object:
    """One message; None when the rank has ended without a word."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None
