"""The launching process's part: who is left, and what each survivor does next."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Final, NoReturn

from flipper.errors import HangError, TrainingError
from flipper.failstop.messages import Dying, Joined, Lost, Ready, allow, plan_of
from flipper.failstop.spec import FailstopSpec
from flipper.training.launch import GRACE_SECONDS, STOP, Ranks, receive
from flipper.training.ranks import Failure
from flipper.training.spec import Event

LOOK_SECONDS: Final = 0.2
"""Between looks at ranks that say nothing."""


class RankLost(Exception):
    """Ranks died, and the run is to be restarted.

    died: rank -> when, CLOCK_MONOTONIC in seconds. step: the one under way. noticed: when the first loss was. doomed:
    ranks that have come to the point of their kill, as these or at the same one, and are lost with them, seen or not.
    """

    def __init__(self, died: Mapping[int, float], step: int, noticed: float, doomed: Collection[int]) -> None:
        super().__init__(died, step, noticed, doomed)
        self.died, self.step, self.noticed = {**dict.fromkeys(doomed, noticed), **died}, step, noticed
        self.doomed = frozenset(doomed)


@dataclass
class Coordinator:
    """Follows the ranks of one launch until all that are left have ended.

    alive: ranks, by their numbers at the start. died: when each lost one died. doomed: those that die at the same point
    as one that has said so. untold: those of which no plan knows.
    stage: "running", "losing" until all that are left have told of the loss, "readying" until all have read the plan,
    "joining" until all are in the new group. since: when that stage began. detected: when the loss that is being
    recovered from was; 0 when none is. joined: whether the group of this generation ever stood. failures: errors that
    ended ranks, the first at `failed`: what others saw of a death may be told before it.
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
    doomed: set[int] = field(default_factory=set)
    untold: set[int] = field(default_factory=set)
    reports: dict[int, Lost] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    detected: float = 0.0
    joined: bool = True
    failures: dict[int, Failure | None] = field(default_factory=dict)
    failed: float = 0.0

    def follow(self) -> None:
        """Until every survivor is done. Raises RankLost under "restart", else the FlipperError that ends the run."""
        at = dict(enumerate(self.ranks.connections))
        self.alive, done = set(at), False
        heard = time.monotonic()
        while at:
            for rank, message in heard_from(at, LOOK_SECONDS):
                heard = time.monotonic()
                done = done or message == "done"
                if message is None and not done:  # once one is done all are, and nothing can be lost
                    self._note_death(rank)
                elif message != "done":
                    self._take(rank, message)
            if self.untold and self.job.recovery == "restart":
                self._restart(at)
            if self.failures and self.job.recovery == "restart":  # ranks failed that waited, to begin, for one stopped
                self._fence(set(at), math.inf)
            if self.failures and (not at or time.monotonic() - self.failed > GRACE_SECONDS):
                raise self.ranks.cause({**self.failures, **dict.fromkeys(self.untold)})  # a death comes before them
            if not done or self.stage == "joining":  # who joined last may be heard only when another one is done
                self._go_on(time.monotonic() - heard)

    def _take(self, rank: int, message: object) -> None:
        match message:
            case dict():
                self.step = message["step"] if message["event"] in ("start", "step") else self.step
                self.on_event(message)
            case Dying(time=when, ranks=ranks):
                self.died[rank] = when
                self.doomed.update(ranks)
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
                self.failures[rank] = message
                self.failed = self.failed or time.monotonic()

    def _note_death(self, rank: int) -> None:
        now = time.monotonic()
        self.died.setdefault(rank, now)
        self.alive.discard(rank)
        self.reports.pop(rank, None)
        self.untold.add(rank)
        if self.job.recovery is None:
            raise self.ranks.cause({rank: None})
        if self.job.recovery == "restart":
            return
        if len(self.alive) < self.job.min_ranks:
            raise too_few(set(self.died), len(self.alive), len(self.ranks.processes), self.job.min_ranks)
        if self.stage == "readying":
            self._plan()

    def _restart(self, at: dict[int, Connection]) -> NoReturn:
        """Raise RankLost, once all is heard that was said by then: of the last checkpoint, too."""
        now = time.monotonic()
        for rank, message in said_by_now(at):
            if message is None:
                self.died.setdefault(rank, now)
            elif not isinstance(message, Failure):
                self._take(rank, message)
        raise RankLost(self.died, self.step + 1, now, self.doomed)

    def _go_on(self, silence: float) -> None:
        if self.stage == "running":
            if silence > self.job.train.timeout + GRACE_SECONDS:
                raise HangError(f"no rank gave a sign; ended after {silence:g} s of silence (--timeout sets how long)")
        elif self.stage == "losing":
            if self.alive <= set(self.reports):
                slow = not self.joined and time.monotonic() - self.detected < self.job.train.timeout
                if self.untold or slow:  # a group that didn't come about though all live is made anew
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
        self.detected, self.joined = 0.0, True
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
        self.joined = False
        self._enter("readying")
        plan_of(self.generation, self.job.recovery or "", self.reports).write(self.ranks.place)


def heard_from(at: dict[int, Connection], seconds: float) -> Iterator[tuple[int, object]]:
    """A message of each rank that has something to say by then (see receive). Who has said the last word leaves `at`.

    Raises CancelledError where a pool has called the run off.
    """
    stop = STOP.get()
    ready: list[object] = list(wait([*at.values(), *([] if stop is None else [stop])], seconds))
    if stop in ready:
        raise CancelledError("the run was called off")
    for rank, connection in list(at.items()):
        if connection in ready:
            message = receive(connection)
            if message in ("done", None) or isinstance(message, Failure):
                del at[rank]
            yield rank, message


def said_by_now(at: dict[int, Connection]) -> Iterator[tuple[int, object]]:
    """All messages that lie in the pipes, as heard_from yields one of each."""
    while any(connection.poll() for connection in at.values()):
        yield from heard_from(at, 0.0)


def too_few(died: set[int], left: int, ranks: int, least: int) -> TrainingError:
    """The error for fewer survivors than --min-ranks."""
    return TrainingError(
        f"{ranks_named(died)} died, and {left} of {ranks} ranks are left: fewer than --min-ranks {least}"
    )


def ranks_named(ranks: Collection[int]) -> str:
    """As "rank 2" or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
