"""What a run whose ranks die is asked to do; plain values that can be sent to another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flipper.errors import UsageError
from flipper.failstop.kills import Kill, check
from flipper.training.spec import TrainSpec

RECOVERIES: Final = ("restart", "rollback", "lossy")
WORLD_BATCHES: Final = ("fixed", "per-rank")
WORLD_RATES: Final = ("keep", "linear")
LOST_SHARES: Final = ("drop", "zero")


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
    restarted: whether this goes on with a run that has lost ranks.
    """

    train: TrainSpec
    kills: tuple[Kill, ...] = ()
    recovery: str | None = None
    min_ranks: int = 1
    world_batch: str = "fixed"
    world_rate: str = "keep"
    lost_share: str = "drop"
    restarted: bool = False

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
        check(self.kills, train.parallel.ranks)
        if not 1 <= self.min_ranks <= train.parallel.ranks:
            raise UsageError(f"--min-ranks {self.min_ranks}: the layout has {train.parallel.ranks} ranks")
        if self.recovery == "restart" and (train.save is None or not train.save_every):
            raise UsageError("--recovery restart needs checkpoints to restart from: give --save DIR and --save-every N")

    @property
    def overlapped(self) -> bool:
        """Whether the ranks are whole replicas that average bucket by bucket, and apply while they compute."""
        parallel = self.train.parallel
        return parallel.data in ("ddp", "mpi") and parallel.model is None
