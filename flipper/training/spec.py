"""What a training run is asked to do; plain values that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flipper.errors import UsageError
from flipper.training import recipes

# One JSON-able record of the metrics: "event" names what happened, the other keys say how.
Event = dict[str, Any]

LAYOUTS: Final = ("single", "ddp", "pipeline")
SUFFIXES: Final = {"safetensors": ".safetensors", "pytorch": ".pt", "hdf5": ".h5"}
MAX_RANKS: Final = 1024


@dataclass(frozen=True)
class Parallel:
    """A layout and its number of ranks, as `ddp:2` says it."""

    kind: str
    ranks: int

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """Read `single`, `ddp:N` or `pipeline:N`; UsageError says what is allowed."""
        kind, colon, count = text.partition(":")
        known = "known: single, " + ", ".join(f"{name}:N" for name in LAYOUTS if name != "single")
        if kind not in LAYOUTS or (kind == "single") == bool(colon):
            raise UsageError(f"no layout {text!r}; {known}")
        if kind == "single":
            return cls(kind, 1)
        if not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= MAX_RANKS):
            raise UsageError(f"layout {text!r}: the number of ranks must be 1 to {MAX_RANKS}; {known}")
        return cls(kind, int(count))

    def __str__(self) -> str:
        return self.kind if self.kind == "single" else f"{self.kind}:{self.ranks}"


@dataclass(frozen=True)
class TrainSpec:
    """One training run.

    steps, epochs: where it ends, counted from the beginning of training; exactly one is given.
    seed: of initialisation, data order and dropout; None takes the resumed checkpoint's.
    save: folder for checkpoints, one at the end and one every `save_every` steps (0: only at the end).
    timeout: seconds after which a rank that waits for another one gives up.
    """

    recipe: str
    parallel: Parallel = Parallel("single", 1)
    steps: int | None = None
    epochs: int | None = None
    seed: int | None = None
    device: str = "auto"
    resume: Path | None = None
    save: Path | None = None
    save_every: int = 0
    checkpoint_format: str = "safetensors"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        recipes.check_name(self.recipe)
        if (self.steps is None) == (self.epochs is None):
            raise UsageError("give exactly one of --epochs and --steps")
        if self.checkpoint_format not in SUFFIXES:
            known = ", ".join(SUFFIXES)
            raise UsageError(f"no checkpoint format {self.checkpoint_format!r}; known: {known}")
        if self.seed is None and self.resume is None:
            raise UsageError("a run that doesn't resume needs a seed")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"the seed must be 0 to 2**64 - 1, not {self.seed}")
        if self.save_every and self.save is None:
            raise UsageError("--save-every needs --save DIR")


def checkpoint_path(folder: Path, step: int, checkpoint_format: str) -> Path:
    """Where `--save` puts the checkpoint of a step."""
    return folder / f"step-{step:06d}{SUFFIXES[checkpoint_format]}"
