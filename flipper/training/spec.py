"""What a training run is asked to do; plain values that can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from flipper.errors import UsageError
from flipper.training import recipes
from flipper.training.allreduce import Allreduce
from flipper.training.faults_file import LiveFaults
from flipper.training.layouts import SINGLE, Parallel
from flipper.training.reach import Reach

# One JSON-able record of the metrics: "event" names what happened, the other keys say how.
Event = dict[str, Any]

ALWAYS: Final = ("nonfinite-loss", "loss-spike", "grad-norm-spike")
"""Detectors that cost nothing."""

DETECTORS: Final = (*ALWAYS, "nonfinite-state", "replicas", "replay")
"""Detectors that `--detect` knows: of state, a pass over it; of replicas, a digest; replay doubles a step."""

LONGEST_TIMEOUT: Final = 1e6
"""Seconds; the libraries below count nanoseconds in 64 bits."""

DEVICES: Final = ("auto", "cpu", "cuda")
"""Where ranks may compute; auto: on the GPUs where there are any."""

SUFFIXES: Final = {"safetensors": ".safetensors", "pytorch": ".pt", "hdf5": ".h5", "dcp": ".dcp"}


@dataclass(frozen=True)
class Watch:
    """What a run is compared with.

    digest_at: steps after which the resume digest is told. golden: step -> the resume digest of the golden run there;
    a run that meets it has the golden run's future. reference: the golden run's last checkpoint, to measure the
    distance from. stop: end a run as soon as its future is known: it met the golden run, or nothing of it is finite.
    """

    digest_at: frozenset[int] = frozenset()
    golden: Mapping[int, str] = field(default_factory=dict)
    reference: Path | None = None
    stop: bool = True

    def asks(self, step: int) -> bool:
        """Whether a digest is due after this step."""
        return step in self.digest_at or step in self.golden


@dataclass(frozen=True)
class TrainSpec:
    """One training run.

    steps, epochs: where it ends, counted from the beginning of training; without either the recipe's own epochs.
    seed: of initialisation, data order and dropout; None takes the resumed checkpoint's.
    save: folder for checkpoints, one at the end and one every `save_every` steps (0: only at the end), and one at the
    end of epoch `save_epoch`. mtbf: seconds between failures of the job, instead of save_every: the interval is worked
    out from it, and from what steps and a save take.
    timeout: seconds after which a rank that waits for another one gives up.
    data_dir: where recipes find data that isn't installed with a package.
    allreduce: "ordered" sums gradients in rank order, "native" as the backend does, "mesh:RxC" by a schedule that goes
    round the `failed` chips of a mesh; see summing.
    inject, at, reach: faults to strike live state with, after step `at` (gradients: in the step that follows), and
    which copies of it: "all", "one" or "rank:R".
    evaluate_every: evaluate every N steps, beside the ends of epochs and of the run; 0: only there.
    watch: the golden run that this one is compared with while it trains.
    probe_every: compare the replicas' parameters every N steps; 0 never. detect: of DETECTORS, beside ALWAYS.
    """

    recipe: str
    parallel: Parallel = SINGLE
    steps: int | None = None
    epochs: int | None = None
    seed: int | None = None
    device: str = "auto"
    resume: Path | None = None
    save: Path | None = None
    save_every: int = 0
    mtbf: float | None = None
    checkpoint_format: str = "safetensors"
    timeout: float = 300.0
    data_dir: Path | None = None
    allreduce: str = "ordered"
    inject: LiveFaults | None = None
    at: int | None = None
    reach: str = "all"
    probe_every: int = 0
    detect: tuple[str, ...] = ()
    save_epoch: int | None = None
    evaluate_every: int = 0
    watch: Watch | None = None
    failed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        recipes.check_name(self.recipe)
        if self.steps is not None and self.epochs is not None:
            raise UsageError("give --epochs or --steps, not both")
        if self.device not in DEVICES:
            raise UsageError(f"no device {self.device!r}; known: {', '.join(DEVICES)}")
        if self.checkpoint_format not in SUFFIXES:
            known = ", ".join(SUFFIXES)
            raise UsageError(f"no checkpoint format {self.checkpoint_format!r}; known: {known}")
        if self.seed is None and self.resume is None:
            raise UsageError("a run that doesn't resume needs a seed")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"the seed must be 0 to 2**64 - 1, not {self.seed}")
        if (self.save_every or self.mtbf is not None) and self.save is None:
            raise UsageError("--save-every needs --save DIR")
        if self.mtbf is not None and (self.save_every or not 0 < self.mtbf < float("inf")):
            raise UsageError("the interval between checkpoints is given, or worked out from a time above 0: not both")
        if (self.inject is None) != (self.at is None):
            raise UsageError("--inject and --at go together: the faults, and the step after which they strike")
        if not 0 < self.timeout <= LONGEST_TIMEOUT:  # nor NaN
            raise UsageError(f"--timeout must be above 0 and at most {LONGEST_TIMEOUT:g} seconds, not {self.timeout}")
        _ = self.summing  # refuses what it can't be
        Reach.parse(self.reach, self.parallel)
        if unknown := sorted(set(self.detect) - set(DETECTORS)):
            raise UsageError(f"no detector {unknown[0]!r}; known: {', '.join(DETECTORS)}")
        probing = self.probe_every or "replicas" in self.detect
        if probing and not self.parallel.replicated:
            raise UsageError(f"{self.parallel} has no replicas to compare; ddp:N and hooks:N have")

    @cached_property
    def summing(self) -> Allreduce:
        """What allreduce and failed ask for."""
        return Allreduce.parse(self.allreduce, self.failed, self.parallel)


def checkpoint_path(folder: Path, step: int, checkpoint_format: str) -> Path:
    """Where `--save` puts the checkpoint of a step."""
    return folder / f"step-{step:06d}{SUFFIXES[checkpoint_format]}"
