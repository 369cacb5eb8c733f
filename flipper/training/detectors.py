"""Detectors: what a run can notice of a fault by itself, each with the step at which it did."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import torch

from flipper.training.canonical import tensor_bytes
from flipper.training.parallel.layout import Layout, StepResult
from flipper.training.replicas import Comparison
from flipper.training.schedules import settings

WINDOW: Final = 50
"""Steps that a spike is judged by."""

FEWEST: Final = 10
"""Steps before any is."""

SPIKE: Final = 8.0
"""Robust standard deviations above the window's median that make a spike."""

TIMES_LARGEST: Final = 2.0
"""How often the window's largest value a spike is at least: gradients that grow steadily early on are none."""


@dataclass
class Spikes:
    """Values far above those of the last steps.

    The robust z-score is (value - median) / (1.4826 x median absolute deviation). Source: Iglewicz and Hoaglin, How to
    detect and handle outliers, 1993. Spikes themselves and what isn't finite don't enter the window. Beside the score a
    spike needs to be twice the window's largest value: that left two of eleven alarms in 24 clean runs of four recipes.
    """

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def score(self, value: float) -> float | None:
        """The z-score if it makes a spike, else None; a value that isn't finite is another detector's."""
        if not math.isfinite(value):
            return None
        found = None
        if len(self.recent) >= FEWEST:
            middle = statistics.median(self.recent)
            spread = 1.4826 * statistics.median(abs(each - middle) for each in self.recent)
            score = (value - middle) / max(spread, 1e-9 * abs(middle), 1e-300)
            found = score if score > SPIKE and value > TIMES_LARGEST * max(self.recent) else None
        if found is None:
            self.recent.append(value)
        return found


@dataclass(frozen=True)
class Finding:
    """A detector that went off: its name, the rank that it points to, and what it measured."""

    detector: str
    rank: int
    value: float


class Detectors:
    """The detectors of a run. Each speaks when it goes off, and again only after it was quiet for a step."""

    def __init__(self, names: Iterable[str], layout: Layout) -> None:
        self._names = set(names)
        self._layout = layout
        self._loss, self._norm = Spikes(), Spikes()
        self._sounding: set[str] = set()

    @property
    def replays(self) -> bool:
        """Whether each step is to be taken twice."""
        return "replay" in self._names

    def after(
        self, result: StepResult, replayed: int | None = None, replicas: Comparison | None = None
    ) -> list[Finding]:
        """What is noticed after a step; a collective.

        replayed: the first rank whose second attempt differed. replicas: their comparison, if there was one.
        """
        states = "nonfinite-state" in self._names
        first = _first(self._layout, _count_nonfinite(self._layout)) if states else None  # before anything is noted
        found = list(self._measured(result))
        if first is not None:
            found.append(Finding("nonfinite-state", *first))
        if replayed is not None:
            found.append(Finding("replay", replayed, 1.0))
        if "replicas" in self._names and replicas is not None and replicas.rank is not None:
            found.append(Finding("replicas", replicas.rank, replicas.max_abs_difference))
        names = {finding.detector for finding in found}
        news = [finding for finding in found if finding.detector not in self._sounding]
        self._sounding = names
        return news

    def _measured(self, result: StepResult) -> Iterable[Finding]:
        if "nonfinite-loss" in self._names and not math.isfinite(result.loss):
            yield Finding("nonfinite-loss", 0, result.loss)
        for name, spikes, value in (
            ("loss-spike", self._loss, result.loss),
            ("grad-norm-spike", self._norm, result.grad_norm),
        ):
            if name in self._names and (score := spikes.score(value)) is not None:
                yield Finding(name, 0, score)


def _count_nonfinite(layout: Layout) -> float:
    """Elements of this rank's parameters, buffers and optimizer state that aren't finite."""
    return float(
        sum(
            (~shard.tensor.isfinite()).sum().item()
            for shard in layout.live().values()
            if shard.tensor.is_floating_point()
        )
    )


def _first(layout: Layout, value: float) -> tuple[int, float] | None:
    """The first rank whose value isn't zero, with it; a collective."""
    return next(((rank, each) for rank, each in enumerate(layout.grid.everyone(value)) if each), None)


def replayed_step(layout: Layout, step: Callable[[], StepResult]) -> tuple[StepResult, int | None]:
    """Take a step twice from the same state and compare bit for bit; the first attempt's result is kept.

    Returns what it measured, and the first rank whose attempts differ. It doubles the time of a step and holds two
    copies of the rank's state.
    """
    before = _Snapshot(layout)
    result = step()
    first = _Snapshot(layout)
    before.put_back()
    step()
    differs = first.differs()
    first.put_back()
    found = _first(layout, float(differs))
    return result, None if found is None else found[0]


class _Snapshot:
    """A copy of all that the next step on this rank depends on."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._state = {name: shard.tensor.detach().clone() for name, shard in layout.live().items()}
        self._schedule = None if layout.schedule is None else layout.schedule.snapshot()
        self._settings = settings(layout.optimizer)
        self._generator = torch.get_rng_state()
        cuda = layout.grid.device.type == "cuda"
        self._cuda = torch.cuda.get_rng_state(layout.grid.device) if cuda else None

    def put_back(self) -> None:
        """Make the rank what it was."""
        live = self._layout.live()
        with torch.no_grad():
            for name, copy in self._state.items():
                live[name].tensor.copy_(copy)
        if not any(name.startswith("optimizer.") for name in self._state):
            self._layout.optimizer.state.clear()  # there was none before the first step
        if self._layout.schedule is not None and self._schedule is not None:
            self._layout.schedule.put_back(self._schedule)
        for group, held in zip(self._layout.optimizer.param_groups, self._settings, strict=True):
            group.update(held)
        torch.set_rng_state(self._generator)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._layout.grid.device)

    def differs(self) -> bool:
        """Whether the rank isn't, to the bit, what it was."""
        live = self._layout.live()
        return any(tensor_bytes(live[name].tensor) != tensor_bytes(copy) for name, copy in self._state.items())
