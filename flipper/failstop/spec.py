"""What a run whose ranks die is asked to do; plain values that can be sent to another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flipper.errors import UsageError
from flipper.failstop.choices import LOST_SHARES, RECOVERIES, WORLD_BATCHES, WORLD_RATES
from flipper.failstop.kills import Kill, check
from flipper.training.spec import TrainSpec


def one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise UsageError for another value."""
    if value not in allowed:
        raise UsageError(f"{option} {value!r} is none of {', '.join(allowed)}")


def check_world(batch: str, rate: str, share: str) -> None:
    """Raise UsageError for what survivors can't be told to train with; see FailstopSpec."""
    one_of("--world-batch", batch, WORLD_BATCHES)
    one_of("--world-rate", rate, WORLD_RATES)
    one_of("--lost-share", share, LOST_SHARES)


@dataclass(frozen=True)
class Copy:
    """Where a copy of a rank's state lies that it, or a peer, has handed over: bytes of a file. step: how far it is."""

    path: str
    offset: int
    length: int
    step: int


@dataclass(frozen=True)
class FailstopSpec:
    """A training run, the deaths in it, and what is done then.

    recovery: with None a death ends the run; "restart" ends all ranks and goes on from the last checkpoint with as many
    as before; "rollback" has the survivors take back the step under way and make it again among themselves; "lossy" has
    them keep what was averaged and applied, and finish the rest among themselves.
    min_ranks: with fewer survivors the run fails.
    world_batch: of the survivors' steps: "fixed" shares the whole batch among them, "per-rank" leaves each its own
    number of samples, so that the batch is smaller. world_rate: "keep" the learning rate, or "linear": scale it by the
    samples of the smaller batch. lost_share: what becomes of the dead rank's part in a mean that the others finish:
    "drop", the mean over the others' samples, or "zero", a gradient of nothing.
    peer_copies: under "restart", how many other ranks hold a copy of each one's state in memory, made anew every
    `peer_every` steps; what all ranks go on from is then what is left of these copies.
    restarted: whether this goes on with a run that has lost ranks. boxes: where each rank writes the copies that it
    holds when contact is lost. copies: what each rank goes on from, if not from `train.resume`.
    """

    train: TrainSpec
    kills: tuple[Kill, ...] = ()
    recovery: str | None = None
    min_ranks: int = 1
    world_batch: str = "fixed"
    world_rate: str = "keep"
    lost_share: str = "drop"
    peer_copies: int = 0
    peer_every: int = 1
    restarted: bool = False
    boxes: tuple[str, ...] = ()
    copies: tuple[Copy, ...] = ()

    def __post_init__(self) -> None:
        train = self.train
        if self.recovery is not None:
            one_of("--recovery", self.recovery, RECOVERIES)
        check_world(self.world_batch, self.world_rate, self.lost_share)
        kind = train.parallel.data
        if self.recovery in ("rollback", "lossy") and not self.overlapped:
            raise UsageError(
                f"--recovery {self.recovery} works under ddp:N and mpi:N, not under {train.parallel}: "
                "--recovery restart does, from a checkpoint"
            )
        if self.recovery is not None and train.parallel.ranks < 2:
            raise UsageError(f"--recovery needs 2 ranks or more, and {train.parallel} has 1")
        inside = [kill for kill in self.kills if kill.step is None or kill.bucket is not None]
        if inside and not self.overlapped:
            raise UsageError(f"--kill {inside[0]}: under {train.parallel} ranks die before a step, as rank:1@step:20")
        survivors = self.recovery in ("rollback", "lossy")
        if not survivors and (never := [kill for kill in self.kills if kill.recovery is not None]):
            raise UsageError(
                f"--kill {never[0]}: ranks die in a recovery only where others survive, under --recovery rollback and "
                "lossy; say a step, as rank:1@step:20"
            )
        if self.overlapped and "replay" in train.detect:
            raise UsageError("--detect replay takes each step twice, and buckets are applied only once: leave it out")
        if kind == "mpi" and (train.probe_every or "replicas" in train.detect):
            raise UsageError("replicas are compared under ddp:N and hooks:N; leave --probe-every out")
        if kind == "mpi" and train.device == "cuda":
            raise UsageError("mpi:N trains on CPUs; leave --device cuda out")
        if self.overlapped and train.allreduce == "native":
            raise UsageError("--recovery sums gradients in rank order, or by mesh:RxC; leave --allreduce native out")
        if self.overlapped and train.inject is not None and train.inject.target != "state":
            raise UsageError("under --recovery only state can be struck, not gradients")
        check(self.kills, train.parallel.ranks, come_back=self.recovery == "restart")
        if not 1 <= self.min_ranks <= train.parallel.ranks:
            raise UsageError(f"--min-ranks {self.min_ranks}: the layout has {train.parallel.ranks} ranks")
        self._check_source()

    def _check_source(self) -> None:
        """Raise UsageError where there would be nothing to restart from."""
        ranks = self.train.parallel.ranks
        if self.peer_copies and self.recovery != "restart":
            raise UsageError(
                f"--peer-copies are what --recovery restart goes on from; under {self.recovery} the survivors hold the "
                "whole model: leave them out"
            )
        if not 0 <= self.peer_copies < ranks:
            raise UsageError(
                f"--peer-copies {self.peer_copies}: of {ranks} ranks each has {ranks - 1} more to hold its copies"
            )
        if self.peer_copies and self.train.summing.mesh is not None:
            raise UsageError(
                "--peer-copies have all ranks start anew, and those on a mesh go round a lost one: leave one of the "
                "two out"
            )
        if self.peer_every < 1:
            raise UsageError(f"--peer-every {self.peer_every}: must be 1 or more")
        if self.peer_every > 1 and not self.peer_copies:
            raise UsageError("--peer-every says how often the copies of --peer-copies N are made: give both")
        if self.recovery == "restart" and not self.peer_copies and not self.checkpointed:
            raise UsageError(
                "--recovery restart needs something to restart from: give --save DIR and --save-every N, or "
                "--peer-copies N"
            )

    @property
    def checkpointed(self) -> bool:
        """Whether the run writes checkpoints before its end."""
        return self.train.save is not None and (self.train.save_every > 0 or self.train.mtbf is not None)

    @property
    def overlapped(self) -> bool:
        """Whether the ranks are whole replicas that average bucket by bucket, and apply while they compute."""
        parallel = self.train.parallel
        return parallel.data in ("ddp", "mpi") and parallel.model is None
