"""Trains: launches the ranks, follows what they report, and sums it up."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from flipper.checkpoints.output import unfinished
from flipper.errors import UsageError
from flipper.training.launch import run_ranks
from flipper.training.ranks import Emit, Place, outer_place, run_here
from flipper.training.spec import Event, TrainSpec


@dataclass
class TrainResult:
    """What a run came to: the last evaluation, the digests of INTERFACE section 7, and the files written."""

    spec: TrainSpec
    seed: int = 0
    first_step: int = 0
    steps: int = 0
    loss: float | None = None
    accuracy: float | None = None
    state_digest: str = ""
    resume_digest: str = ""
    seconds: float = 0.0
    struck_step: int | None = None
    detected: list[dict[str, object]] = field(default_factory=list)
    replicas_differ_step: int | None = None
    replicas_heal_step: int | None = None
    files: list[str] = field(default_factory=list)
    interval: dict[str, float] | None = None

    def note(self, event: Event) -> None:
        """Take in one event of the run."""
        match event["event"]:
            case "start":
                self.seed, self.first_step = event["seed"], event["step"]
            case "eval" if not event.get("replica"):
                self.loss, self.accuracy = event["loss"], event["accuracy"]
            case "struck":
                self.struck_step = event["step"]
            case "detect":
                self.detected.append({key: event[key] for key in ("detector", "step", "rank")})
            case "replicas":
                self._compare(event["step"], event["equal"])
            case "interval":
                self.interval = {name: value for name, value in event.items() if name not in ("event", "step")}
            case "saved":
                self.files.append(event["path"])
            case "end":
                self.steps, self.seconds = event["step"], event["seconds"]
                self.state_digest, self.resume_digest = event["state_digest"], event["resume_digest"]

    def _compare(self, step: int, equal: bool) -> None:
        """Note when the replicas first differ, and since when they are equal again."""
        if not equal:
            self.replicas_differ_step = step if self.replicas_differ_step is None else self.replicas_differ_step
            self.replicas_heal_step = None
        elif self.replicas_differ_step is not None and self.replicas_heal_step is None:
            self.replicas_heal_step = step

    def record(self) -> dict[str, object]:
        """The record that `flipper train` prints."""
        return {
            "recipe": self.spec.recipe,
            "layout": str(self.spec.parallel),
            "seed": self.seed,
            "first_step": self.first_step,
            "steps": self.steps,
            "loss": self.loss,
            "accuracy": self.accuracy,
            "state_digest": self.state_digest,
            "resume_digest": self.resume_digest,
            "seconds": round(self.seconds, 3),
            "struck_step": self.struck_step,
            "detected": self.detected,
            "replicas_differ_step": self.replicas_differ_step,
            "replicas_heal_step": self.replicas_heal_step,
            "files": self.files,
            **({} if self.interval is None else {"interval": self.interval}),
        }


def train(
    spec: TrainSpec,
    on_event: Callable[[Event], None] | None = None,
    *,
    limit: float | None = None,
    verbose: bool = False,
) -> TrainResult:
    """Run a training job and wait for it: on fresh local processes, or on the ranks that torchrun has started.

    on_event: called with each event (INTERFACE section 7, and "start", "struck") as it happens; under torchrun on
    rank 0 only, whose result is the only one with figures. limit: seconds after which the run is ended.
    Raises UsageError, CheckpointError, MismatchError, OutputError, or TrainingError when a rank fails.
    """
    if spec.parallel.data == "mpi":
        raise UsageError("mpi:N runs by `flipper train` alone, and neither in a pool nor in a campaign")
    result = TrainResult(spec)

    def follow(event: Event) -> None:
        result.note(event)
        if on_event is not None:
            on_event(event)

    body = functools.partial(_train_rank, spec)
    if (place := outer_place(spec.device, spec.timeout)) is not None:
        if place.world != spec.parallel.ranks:
            raise UsageError(
                f"{spec.parallel} takes {spec.parallel.arithmetic} ranks, torchrun has started {place.world}"
            )
        run_here(body, place, follow)
        return result
    with nothing_unfinished(spec.save):
        run_ranks(
            body, spec.parallel.ranks, follow, device=spec.device, timeout=spec.timeout, limit=limit, verbose=verbose
        )
    return result


@contextmanager
def nothing_unfinished(folder: Path | None) -> Iterator[None]:
    """When the run fails, remove what its ranks, which are killed then, were writing to the --save folder."""
    before = set() if folder is None else unfinished(folder)
    try:
        yield
    except BaseException:
        for partial in set() if folder is None else unfinished(folder) - before:
            with suppress(OSError):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        raise


def _train_rank(spec: TrainSpec, place: Place, emit: Emit) -> None:
    from flipper.training.loop import train_rank  # imports torch, which the launching process can do without

    train_rank(spec, place, emit)
