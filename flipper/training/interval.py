"""The interval between checkpoints by Young and Daly, from what a step and a save take in the run itself."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Final

MEASURED: Final = 8
"""Steps that are timed. The one before them isn't: in it, memory is taken and libraries set themselves up."""


def young_daly(write: float, mtbf: float) -> float:
    """Seconds between checkpoints that waste least, to first order: sqrt(2 write mtbf) (Young 1974, Daly 2006)."""
    return math.sqrt(2 * write * mtbf)


@dataclass
class Interval:
    """When checkpoints are due in a run that is to find that out.

    mtbf: seconds between failures of the job. begin: steps done before this run's first. every: steps between
    checkpoints; 0 before the first one, which is written as soon as enough steps are timed, and timed itself.
    """

    mtbf: float
    begin: int
    every: int = 0
    times: list[float] = field(default_factory=list)

    def note(self, seconds: float) -> None:
        """Take in what a step took."""
        if len(self.times) <= MEASURED:
            self.times.append(seconds)

    @property
    def first(self) -> int:
        """The step after which the first checkpoint is written."""
        return self.begin + 1 + MEASURED

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step."""
        return step == self.first or (self.every > 0 and step > self.first and (step - self.first) % self.every == 0)

    def chosen(self, save_seconds: float) -> dict[str, float]:
        """What follows from the steps and a save that took so long: `save_every`, in whole steps, and its grounds."""
        step_seconds = statistics.median(self.times[1:])
        every = max(1, round(young_daly(save_seconds, self.mtbf) / max(step_seconds, 1e-9)))
        return {
            "save_every": every,
            "step_seconds": step_seconds,
            "save_seconds": save_seconds,
            "mtbf_seconds": self.mtbf,
        }
