"""Simulates: one strategy after another under the same failures, each computed in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flipper.errors import UsageError
from flipper.failstop.choices import RECOVERIES
from flipper.failstop.costs import Costs
from flipper.failstop.failures import Failures
from flipper.failstop.spec import check_world, one_of
from flipper.training.interval import young_daly
from flipper.training.launch import run_ranks
from flipper.training.layouts import SINGLE
from flipper.training.ranks import Emit, Place
from flipper.training.spec import Event, TrainSpec

MODES: Final = ("exact", "batched")
ROUNDING: Final = 1e-9
"""Seconds: what sums of the parts of steps differ by from a product."""
NOBODY: Final = "none"
"""The strategy of the run that nothing happens to."""


@dataclass(frozen=True)
class SimulationSpec:
    """What is simulated.

    train: recipe, steps, seed; its layout is not looked at. workers: as many as the batch has samples at most.
    batch_size: the recipe's without it. mtbf: of the job, for the interval between checkpoints; save_every: in steps,
    instead. Others as in FailstopSpec.
    """

    train: TrainSpec
    workers: int
    recoveries: tuple[str, ...]
    failures: Failures
    costs: Costs
    mode: str = "exact"
    batch_size: int | None = None
    mtbf: float | None = None
    save_every: int | None = None
    min_ranks: int = 1
    world_batch: str = "fixed"
    world_rate: str = "keep"
    lost_share: str = "drop"

    def __post_init__(self) -> None:
        for recovery in self.recoveries:
            one_of("--recovery", recovery, RECOVERIES)
        if len(set(self.recoveries)) < len(self.recoveries):
            raise UsageError(f"--recovery {','.join(self.recoveries)}: give each strategy once")
        one_of("--mode", self.mode, MODES)
        check_world(self.world_batch, self.world_rate, self.lost_share)
        if self.workers < 2:
            raise UsageError(f"--workers {self.workers}: a run that survives a death has 2 or more")
        if not 1 <= self.min_ranks <= self.workers:
            raise UsageError(f"--min-ranks {self.min_ranks}: there are {self.workers} workers")
        if self.save_every is not None and self.save_every < 1:
            raise UsageError(f"--save-every {self.save_every}: must be 1 or more")
        if "restart" in self.recoveries and self.save_every is None and self.mtbf is None:
            raise UsageError("restart from a trace of failures: say by --save-every how often a checkpoint is written")


@dataclass(frozen=True)
class Case:
    """Failures, and the mean seconds between them."""

    mtbf: float
    failures: Failures


@dataclass
class Outcome:
    """What one strategy came to. error: why it ended before its last step, if it did; seconds of simulated time."""

    strategy: str
    failures: int = 0
    loss: float | None = None
    accuracy: float | None = None
    clock: float = 0.0
    ideal: float = 0.0
    world_size: int = 0
    save_every: int = 0
    state_digest: str = ""
    error: str | None = None

    def record(self, clean: Outcome) -> dict[str, object]:
        """The row that `flipper simulate` prints. clean: of the run that nothing happened to."""
        lost = None if self.accuracy is None or clean.accuracy is None else clean.accuracy - self.accuracy
        # Of a run that ended early there is no overhead: it took less time than its steps would have.
        overhead = None if self.error is not None else self.clock - self.ideal
        if overhead is not None and abs(overhead) < ROUNDING:
            overhead = 0.0
        return {
            "strategy": self.strategy,
            "failures": self.failures,
            "final_loss": self.loss,
            "final_accuracy": self.accuracy,
            "accuracy_loss": lost,
            "compute_seconds": self.ideal,
            "overhead_seconds": overhead,
            "overhead_fraction": overhead / self.ideal if overhead is not None and self.ideal else None,
            "world_size_end": self.world_size,
            "save_every": self.save_every or None,
            "state_digest": self.state_digest,
            "error": self.error,
        }


def simulate(spec: SimulationSpec, on_event: Callable[[Event], None] | None = None) -> list[dict[str, object]]:
    """One row a strategy, all under the same failures, compared with a run without any.

    on_event: called with {"event": "simulated", "strategy", "step", "steps"} as it goes on.
    Raises UsageError, CheckpointError, or TrainingError when a step fails.
    """
    clean, *outcomes = (outcome(spec, strategy, on_event) for strategy in (NOBODY, *spec.recoveries))
    return [each.record(clean) for each in outcomes]


def outcome(spec: SimulationSpec, strategy: str, on_event: Callable[[Event], None] | None = None) -> Outcome:
    """What one strategy, or NOBODY, comes to; events and errors as above."""
    found = Outcome(strategy)

    def hear(event: Event) -> None:
        match event["event"]:
            case "eval":
                found.loss, found.accuracy = event["loss"], event["accuracy"]
            case "outcome":
                for name, value in event["values"].items():
                    setattr(found, name, value)
        if on_event is not None:
            on_event(event)

    train = replace(spec.train, parallel=SINGLE)
    body = functools.partial(_rank, replace(spec, train=train), strategy)
    run_ranks(body, 1, hear, device=train.device, timeout=train.timeout)
    return found


def timings(
    spec: SimulationSpec, strategy: str, cases: Sequence[Case], on_event: Callable[[Event], None] | None = None
) -> list[Outcome]:
    """What one strategy takes under each of these failures, in one process; no state is computed, nor told.

    spec.failures and spec.mtbf are not looked at. Raises as simulate.
    """
    found: list[Outcome] = []

    def hear(event: Event) -> None:
        if event["event"] == "outcome":
            found.append(Outcome(strategy, **event["values"]))
        elif on_event is not None:
            on_event(event)

    train = replace(spec.train, parallel=SINGLE)
    body = functools.partial(_timing_rank, replace(spec, train=train), strategy, tuple(cases))
    run_ranks(body, 1, hear, device=train.device, timeout=train.timeout)
    return found


def interval(spec: SimulationSpec, length: float) -> int:
    """Steps between checkpoints. length: seconds of a step."""
    if spec.save_every is not None:
        return spec.save_every
    assert spec.mtbf is not None
    return max(1, round(young_daly(spec.costs.write, spec.mtbf) / max(length, 1e-9)))


def _rank(spec: SimulationSpec, strategy: str, place: Place, emit: Emit) -> None:
    from flipper.failstop.simulating import simulate_strategy  # imports torch

    simulate_strategy(spec, strategy, place, emit)


def _timing_rank(spec: SimulationSpec, strategy: str, cases: Sequence[Case], place: Place, emit: Emit) -> None:
    from flipper.failstop.simulating import time_strategy  # imports torch

    time_strategy(spec, strategy, cases, place, emit)
