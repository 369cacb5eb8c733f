"""The launching process's part in peer copies: what ranks that end hand over, and where those that follow find it."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from flipper.errors import FlipperError, HangError
from flipper.failstop.coordinator import LOOK_SECONDS, RankLost, heard_from, ranks_named, said_by_now
from flipper.failstop.messages import Dying
from flipper.failstop.spec import Copy
from flipper.training.launch import GRACE_SECONDS
from flipper.training.processes import is_stopped
from flipper.training.ranks import Failure
from flipper.training.spec import Event

Copies = dict[tuple[int, int], Copy]
"""(rank, step) -> where that rank's state after that step lies."""

_NAME: Final = "flipper-peers-"


@dataclass(frozen=True)
class HandedOver:
    """A rank that ends has written what it held of itself and of others."""

    copies: Copies


class PartsLost(RankLost):
    """As RankLost. silent: ranks that handed nothing over, the dead among them; copies: what the others did."""

    def __init__(
        self, died: Mapping[int, float], step: int, noticed: float, doomed: Collection[int], silent: Collection[int],
        copies: Copies,
    ) -> None:  # fmt: skip
        super().__init__(died, step, noticed, doomed)
        self.silent, self.copies = silent, copies


class Boxes:
    """A file for each rank, into which it writes what it held once contact is lost.

    They lie in anonymous memory, which ends with this process however that ends; where a system has none that others
    can open by name, they are temporary files.
    """

    def __init__(self, ranks: int) -> None:
        self._open = ExitStack()
        self.paths = tuple(self._box() for _ in range(ranks))

    def close(self) -> None:
        """Give the memory back."""
        self._open.close()

    def _box(self) -> str:
        try:
            number = os.memfd_create(_NAME)
        except (AttributeError, OSError):
            return self._temporary()
        self._open.callback(os.close, number)
        path = f"/proc/{os.getpid()}/fd/{number}"
        return path if os.access(path, os.R_OK | os.W_OK) else self._temporary()

    def _temporary(self) -> str:
        return self._open.enter_context(tempfile.NamedTemporaryFile(prefix=_NAME)).name


def newest(copies: Copies, ranks: int) -> tuple[Copy, ...]:
    """All ranks' copies, in order, after the last step of which each has one; () when there is no such step."""
    for step in sorted({step for _, step in copies}, reverse=True):
        found = [copies[rank, step] for rank in range(ranks) if (rank, step) in copies]
        if len(found) == ranks:
            return tuple(found)
    return ()


def all_gone(silent: Collection[int], ranks: int, count: int) -> str:
    """What is said when every copy of some part is gone, and no checkpoint is there.

    silent: the ranks that are gone. count: how many ranks after it in the ring held each rank's part.
    """
    lost = [rank for rank in sorted(silent) if all((rank + k) % ranks in silent for k in range(count + 1))]
    parts = f"the part{'s' * (len(lost) > 1)} of {ranks_named(lost)}"
    said = f"{ranks_named(silent)} died, and every copy of {parts} of the run with them"
    if len(silent) == ranks:
        return f"{said}: what no rank outlives, only a checkpoint keeps (--save DIR --save-every N)"
    needed = max(next(k for k in range(ranks) if (rank + k) % ranks not in silent) for rank in lost)
    them = "it" if len(lost) == 1 else "them"
    return f"{said}: --peer-copies {needed} would have kept {them}, or a checkpoint (--save DIR --save-every N)"


@dataclass
class Salvage:
    """Follows ranks that all start anew when one is lost, but for what the others are to hand over.

    connections: rank -> its pipe; pids: its process. cause: makes one error of how ranks failed. timeout: seconds that
    a rank waits for another. copied: whether ranks keep copies for each other, and hand them over. starting: seconds
    that they may be silent at first; begun: whether one has said a word, and none holds copies before. died: when each
    lost one died. doomed: those that die at the same point as one that has said so. failures: of those that ended with
    an error, which under a loss all do. noticed: when the first of either was; 0 when all is well.
    """

    connections: Mapping[int, Connection]
    pids: Mapping[int, int | None]
    cause: Callable[[dict[int, Failure | None]], FlipperError]
    on_event: Callable[[Event], None]
    timeout: float
    step: int
    copied: bool = True
    starting: float = 0.0
    begun: bool = False
    died: dict[int, float] = field(default_factory=dict)
    doomed: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    failures: dict[int, Failure | None] = field(default_factory=dict)
    copies: Copies = field(default_factory=dict)
    handed: set[int] = field(default_factory=set)
    noticed: float = 0.0

    def follow(self) -> None:
        """Until all are done. Raises PartsLost, or the FlipperError that ends the run."""
        at, done = dict(self.connections), False
        heard = time.monotonic()
        while at and not (self.lost and not (self.copied and self.begun)):
            for rank, message in heard_from(at, LOOK_SECONDS):
                heard = time.monotonic()
                done = done or message == "done"
                self._take(rank, message, done)
            if not done:
                self._fence(at, time.monotonic() - heard)
        for rank, message in said_by_now(at):  # of the last checkpoint, too
            self._take(rank, message, done)
        if self.lost:
            silent = set(self.connections) - self.handed
            died = {rank: self.died[rank] for rank in self.lost}
            raise PartsLost(died, self.step + 1, self.noticed, self.doomed - self.handed, silent, self.copies)
        if self.failures:
            raise self.cause(self.failures)

    def _take(self, rank: int, message: object, done: bool) -> None:
        match message:
            case dict():
                self.begun = True
                self.step = message["step"] if message["event"] == "step" else self.step
                self.on_event(message)
            case Dying(time=when, ranks=ranks):
                self.died[rank] = when
                self.doomed.update(ranks)
            case HandedOver(copies=copies):
                self.handed.add(rank)
                self.copies |= copies
            case Failure():
                self.failures[rank] = message
                self.noticed = self.noticed or time.monotonic()
            case None if not done:  # once one is done all are, and nothing can be lost
                self.noticed = self.noticed or time.monotonic()
                self.died.setdefault(rank, time.monotonic())
                self.lost.add(rank)

    def _fence(self, at: Mapping[int, Any], silence: float) -> None:
        """Kill ranks that hang; a rank that comes back must find itself dead.

        Those that are stopped or said that they would be, once the others have given up or should have; and any that
        does not end though others have.
        """
        overdue = self.noticed > 0 and time.monotonic() - self.noticed > self.timeout + GRACE_SECONDS
        timeout = self.timeout if self.begun else max(self.timeout, self.starting)
        if not self.noticed and silence < timeout:
            return
        hung = [rank for rank in at if overdue or rank in self.died or is_stopped(self.pids[rank])]
        for rank in hung:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank] or 0, signal.SIGKILL)
        if not hung and not self.noticed and silence > timeout + GRACE_SECONDS:
            raise HangError(f"no rank gave a sign; ended after {silence:g} s of silence (--timeout sets how long)")
