"""The control: a run that stops midway and resumes in fresh processes must equal the uninterrupted one bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from flipper.errors import UsageError
from flipper.training.ranks import outer_rank
from flipper.training.run import TrainResult, train
from flipper.training.spec import Event, TrainSpec, checkpoint_path


@dataclass(frozen=True)
class Control:
    """Both runs' results; `first_difference` names a tensor, or what else differs, and is None when nothing does."""

    uninterrupted: TrainResult
    resumed: TrainResult
    first_difference: str | None

    def record(self) -> dict[str, object]:
        """The record that `flipper train --control` prints: the uninterrupted run's, and the verdict."""
        return {
            **self.uninterrupted.record(),
            "stopped_at": self.resumed.first_step,
            "resumed_state_digest": self.resumed.state_digest,
            "resumed_resume_digest": self.resumed.resume_digest,
            "identical": self.first_difference is None,
            "first_difference": self.first_difference,
        }


def control(spec: TrainSpec, on_event: Callable[[Event], None] | None = None, *, verbose: bool = False) -> Control:
    """Train to the end, then again with a stop halfway, and compare: states, and all that later steps depend on.

    Checkpoints go to a temporary folder, in the spec's format; on_event hears of the uninterrupted run only, and
    nothing of files, which are gone at the end.
    """
    if spec.save is not None:
        raise UsageError("--control keeps no checkpoints: leave out --save")
    if outer_rank() is not None:
        raise UsageError("--control starts fresh ranks three times: run it without torchrun")

    def hear(event: Event) -> None:
        if on_event is not None and event["event"] != "saved":
            on_event(event)

    with tempfile.TemporaryDirectory(prefix="flipper-control-") as folder:
        whole, half, rest = (Path(folder, name) for name in ("whole", "half", "rest"))
        golden = train(replace(spec, save=whole), hear, verbose=verbose)
        middle = (golden.first_step + golden.steps) // 2
        train(replace(spec, save=half, steps=middle, epochs=None), verbose=verbose)
        stopped = checkpoint_path(half, middle, spec.checkpoint_format)
        onward = replace(spec, save=rest, resume=stopped, steps=golden.steps, epochs=None)
        resumed = train(onward, verbose=verbose)
        difference = None
        if (golden.state_digest, golden.resume_digest) != (resumed.state_digest, resumed.resume_digest):
            difference = _first_difference(Path(golden.files[-1]), Path(resumed.files[-1]))
        golden.files.clear()  # the folder is about to go
        return Control(golden, resumed, difference)


def _first_difference(a: Path, b: Path) -> str:
    """The first tensor, by name, whose bytes differ between two checkpoints."""
    from flipper.training.canonical import same_bits
    from flipper.training.saving import load

    left, right = load(a), load(b)
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right or not same_bits(left[name], right[name]):
            return name
    return "the state of a rank other than 0"
