"""Trains through the deaths of ranks: launches them, follows them, and restarts them where that is the recovery."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from flipper.errors import FlipperError, TrainingError, UsageError
from flipper.failstop.coordinator import Coordinator, RankLost, ranks_named
from flipper.failstop.kills import Kill
from flipper.failstop.salvage import Boxes, PartsLost, Salvage, all_gone, newest
from flipper.failstop.spec import FailstopSpec
from flipper.training.launch import started
from flipper.training.ranks import Failure, Place, outer_rank
from flipper.training.run import TrainResult, nothing_unfinished
from flipper.training.spec import Event

MOST_FRUITLESS: Final = 5
"""Launches in a row whose ranks die before they have made a step: that is no accident any more."""


@dataclass
class FailstopResult(TrainResult):
    """What such a run came to. lost: the ranks that died, and when; world_size: how many were left at the end."""

    recovery: str | None = None
    lost: list[dict[str, object]] = field(default_factory=list)
    recovery_seconds: float = 0.0
    world_size: int = 0

    def note(self, event: Event) -> None:
        """Take in one event of the run."""
        match event["event"]:
            case "start" if self.world_size:  # restarted
                return
            case "start":
                self.world_size = self.spec.parallel.ranks
            case "rank-lost":
                self.lost.append({key: event[key] for key in ("rank", "step", "seconds_to_detect")})
            case "recovered":
                self.world_size = event["world_size"]
                self.recovery_seconds += event["seconds"]
        super().note(event)

    def record(self) -> dict[str, object]:
        """The record that `flipper train` prints."""
        return {
            **super().record(),
            "recovery": self.recovery,
            "lost": self.lost,
            "world_size": self.world_size,
            "recovery_seconds": round(self.recovery_seconds, 6),
        }


def train_through(
    job: FailstopSpec, on_event: Callable[[Event], None] | None = None, *, verbose: bool = False
) -> FailstopResult:
    """Run a training job whose ranks may die, killed as the job says or by whomever, and wait for it.

    on_event: called with each event as it happens, "rank-lost" and "recovered" among them.
    Raises UsageError, CheckpointError, MismatchError, OutputError, or TrainingError when too few ranks are left.
    """
    if outer_rank() is not None:
        raise UsageError("--kill and --recovery need ranks that flipper itself has started; leave torchrun out")
    result = FailstopResult(job.train, recovery=job.recovery)

    def follow(event: Event) -> None:
        result.note(event)
        if on_event is not None:
            on_event(event)

    with nothing_unfinished(job.train.save):
        _Launches(job, result, follow, verbose).until_done()
    return result


@dataclass
class _Launches:
    """The launches of one run, each going on where the one before it broke off.

    lost: when the loss was noticed that the run is being restarted from. step, saved: the last one that was begun or
    told of, and that of the last checkpoint. stepped: whether this launch has made a step. boxes: where ranks hand over
    copies, those of the last launch and of this one. fruitless: launches in a row that ended before their first step.
    """

    job: FailstopSpec
    result: FailstopResult
    follow: Callable[[Event], None]
    verbose: bool
    lost: float | None = None
    step: int = 0
    saved: int = -1
    stepped: bool = False
    boxes: list[Boxes] = field(default_factory=list)
    fruitless: int = 0

    def until_done(self) -> None:
        try:
            while True:
                self.stepped = False
                if self.job.peer_copies:
                    self.boxes.append(Boxes(self.job.train.parallel.ranks))
                    self.job = replace(self.job, boxes=self.boxes[-1].paths)
                try:
                    self._launch()
                    return
                except RankLost as death:
                    self._tell(death)
                    self.fruitless = 0 if self.stepped else self.fruitless + 1
                    if self.fruitless == MOST_FRUITLESS:
                        raise TrainingError(
                            f"{ranks_named(death.died)} died, before the first step like those before it: given up"
                        ) from None
                    self.job = self._restarted(death)
        finally:
            self._keep_boxes(0)

    def _launch(self) -> None:
        job, train = self.job, self.job.train
        if train.parallel.data == "mpi":
            from flipper.failstop.mpirun import STARTING_SECONDS, launched

            with launched(job, self.verbose) as mpi_ranks:
                if job.peer_copies:
                    self._salvaging(mpi_ranks.connections, mpi_ranks.pids, mpi_ranks.cause, STARTING_SECONDS)
                else:
                    mpi_ranks.follow(job, self._hear)
            return
        body = functools.partial(_rank, job)
        with started(
            body, train.parallel.ranks, device=train.device, timeout=train.timeout, verbose=self.verbose
        ) as ranks:
            if job.peer_copies or (job.recovery == "restart" and not job.overlapped):
                pids = {rank: process.pid for rank, process in enumerate(ranks.processes)}
                self._salvaging(dict(enumerate(ranks.connections)), pids, ranks.cause)
            else:
                Coordinator(ranks, job, self._hear, step=self.step).follow()

    def _salvaging(
        self,
        pipes: Mapping[int, Connection],
        pids: Mapping[int, int | None],
        cause: Callable[[dict[int, Failure | None]], FlipperError],
        starting: float = 0.0,
    ) -> None:
        """Follow ranks that are all started anew. starting: seconds that they may take to begin, at least."""
        copied = self.job.peer_copies > 0
        Salvage(pipes, pids, cause, self._hear, self.job.train.timeout, self.step, copied, starting).follow()

    def _hear(self, event: Event) -> None:
        match event["event"]:
            case "start":
                self.step = event["step"]
                if self.lost is not None:
                    self._tell_recovered(self.lost)
                    self.lost = None
            case "step" if event["step"] <= self.step:
                return  # told again, since the rank that told it first has died
            case "step":
                self.step = event["step"]
                if not self.stepped:  # so all ranks have copies of their own with others again
                    self._keep_boxes(1)
                self.stepped = True
            case "saved":
                self.saved = event["step"]
        self.follow(event)

    def _tell(self, death: RankLost) -> None:
        self.lost = death.noticed
        for rank, when in sorted(death.died.items()):
            seconds = max(0.0, death.noticed - when)
            self.follow({"event": "rank-lost", "rank": rank, "step": death.step, "seconds_to_detect": seconds})

    def _tell_recovered(self, lost: float) -> None:
        source = "peers" if self.job.copies else "beginning" if self.job.train.resume is None else "checkpoint"
        self.follow({
            "event": "recovered", "strategy": "restart", "world_size": self.job.train.parallel.ranks,
            "seconds": time.monotonic() - lost, "step": self.step, "source": source,
        })  # fmt: skip

    def _restarted(self, death: RankLost) -> FailstopSpec:
        """The job that goes on: from the copies that are left, the last checkpoint, or, when there is none yet, from
        where it began. Raises TrainingError when what was done is lost."""
        job, ranks = self.job, self.job.train.parallel.ranks
        job = replace(job, kills=_left(job.kills, death), restarted=True)
        if isinstance(death, PartsLost):
            copies = newest(death.copies, ranks)
            if not copies and not self.stepped:
                copies = job.copies
            if copies and copies[0].step >= self.saved:
                return replace(job, copies=copies)
            if self.stepped and not self.result.files and not job.checkpointed and job.train.resume is None:
                raise TrainingError(all_gone(death.silent, ranks, job.peer_copies))
        train = job.train
        if self.result.files:
            train = replace(train, resume=Path(self.result.files[-1]), seed=self.result.seed)
            if train.at is not None and train.at < self.saved:  # the checkpoint has been struck already
                train = replace(train, inject=None, at=None)
        elif train.seed is None and self.result.world_size:
            train = replace(train, seed=self.result.seed)
        return replace(job, train=train, copies=())

    def _keep_boxes(self, count: int) -> None:
        """Give back all but the last ones."""
        while len(self.boxes) > count:
            self.boxes.pop(0).close()


def _left(kills: tuple[Kill, ...], death: RankLost) -> tuple[Kill, ...]:
    """The kills that are still to come: a restarted rank may die again, but not by the same kill.

    Who has died by something else has its kill before it.
    """
    first = {kill.rank: kill for kill in sorted(kills, key=lambda kill: kill.step or 0, reverse=True)}
    return tuple(kill for kill in kills if kill.rank not in death.doomed or kill != first[kill.rank])


def _rank(job: FailstopSpec, place: Place, send: Callable[[Any], None]) -> None:
    from flipper.failstop.loop import train_rank  # imports torch, which the launching process can do without

    train_rank(job, place, send)
