"""Trains through the deaths of ranks: launches them, follows them, and restarts them where that is the recovery."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flipper.errors import UsageError
from flipper.failstop.coordinator import Coordinator, RankLost
from flipper.failstop.kills import Kill
from flipper.failstop.spec import FailstopSpec
from flipper.training.launch import started
from flipper.training.ranks import Place, outer_rank
from flipper.training.run import TrainResult, nothing_unfinished
from flipper.training.spec import Event


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
        _launch_until_done(job, result, follow, verbose)
    return result


def _launch_until_done(
    job: FailstopSpec, result: FailstopResult, follow: Callable[[Event], None], verbose: bool
) -> None:
    lost: float | None = None
    step = 0

    def hear(event: Event) -> None:
        nonlocal lost, step
        step = event["step"] if event["event"] in ("start", "step") else step
        if event["event"] == "start" and lost is not None:
            seconds = time.monotonic() - lost
            follow({"event": "recovered", "strategy": "restart", "world_size": result.world_size, "seconds": seconds})
            lost = None
        follow(event)

    while True:
        try:
            _launch(job, hear, step, verbose)
            return
        except RankLost as death:
            lost = time.monotonic()
            for rank, when in sorted(death.died.items()):
                seconds = max(0.0, death.noticed - when)
                follow({"event": "rank-lost", "rank": rank, "step": death.step, "seconds_to_detect": seconds})
            job = _restarted(job, death, result)


def _launch(job: FailstopSpec, hear: Callable[[Event], None], step: int, verbose: bool) -> None:
    train = job.train
    if train.parallel.data == "mpi":
        from flipper.failstop.mpirun import launched

        with launched(job, verbose) as ranks:
            ranks.follow(job, hear)
        return
    body = functools.partial(_rank, job)
    with started(body, train.parallel.ranks, device=train.device, timeout=train.timeout, verbose=verbose) as ranks:
        Coordinator(ranks, job, hear, step=step).follow()


def _restarted(job: FailstopSpec, death: RankLost, result: FailstopResult) -> FailstopSpec:
    """The job that goes on from the last checkpoint, or from where it began when there is none yet."""
    train = job.train
    if result.files:
        train = replace(train, resume=Path(result.files[-1]), seed=result.seed)
    elif train.seed is None:
        train = replace(train, seed=result.seed)
    return replace(job, train=train, kills=_left(job.kills, death), restarted=True)


def _left(kills: tuple[Kill, ...], death: RankLost) -> tuple[Kill, ...]:
    """The kills that are still to come: a restarted rank may die again, but not by the same kill."""
    return tuple(kill for kill in kills if kill.rank not in death.died)


def _rank(job: FailstopSpec, place: Place, send: Callable[[Any], None]) -> None:
    from flipper.failstop.loop import train_rank  # imports torch, which the launching process can do without

    train_rank(job, place, send)
