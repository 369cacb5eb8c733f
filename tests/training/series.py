"""Runs of several specs, one after the other on the same ranks: cheaper than fresh ones, and none may leave a trace."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rank_bodies import train_each

from flipper.training.launch import run_ranks
from flipper.training.run import TrainResult
from flipper.training.spec import Event, Parallel, TrainSpec

LAYOUTS: Final = (
    *("single", "ddp:2", "ddp:3", "hooks:2", "hooks:3", "fsdp:2", "fsdp:3", "tensor:2", "pipeline:2"),
    *("pipeline-1f1b:2", "ddp:2+pipeline:2", "ddp:2+pipeline-1f1b:2", "fsdp:2+tensor:2"),
)


@dataclass
class Run(TrainResult):
    """A run's result and its events."""

    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> list[Event]:
        """The events of one kind, without its name."""
        return [{k: v for k, v in event.items() if k != "event"} for event in self.events if event["event"] == kind]

    @property
    def losses(self) -> list[float]:
        return [event["loss"] for event in self.of("step")]

    @property
    def digests(self) -> tuple[str, str]:
        return self.state_digest, self.resume_digest


def spec(recipe: str, layout: str = "single", **options: object) -> TrainSpec:
    """A spec by the layout's name; seed 3 where nothing is resumed."""
    if "resume" not in options:
        options.setdefault("seed", 3)
    return TrainSpec(recipe, Parallel.parse(layout), **{"timeout": 60, **options})  # type: ignore[arg-type]


def train_all(specs: Sequence[TrainSpec]) -> list[Run]:
    """Train them all, in this order, on one launch of the ranks of their layout; each result with its events."""
    runs = [Run(each) for each in specs]

    def hear(event: Event) -> None:
        run = runs[event.pop("run")]
        run.events.append(event)
        run.note(event)

    (ranks,) = {each.parallel.ranks for each in specs}
    run_ranks(functools.partial(train_each, tuple(specs)), ranks, hear, timeout=60)
    return runs
