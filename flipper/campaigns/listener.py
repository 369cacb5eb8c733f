"""Listener: takes in the events of a training run, and makes of them the record that is stored."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flipper.campaigns.fault_kinds import RANK_LOSS
from flipper.campaigns.record import COMPLETED, RunRecord
from flipper.campaigns.spec import Spec
from flipper.training.spec import Event


@dataclass
class Listener:
    """Takes in the events of a run and keeps what a record needs; `record` makes it."""

    metric: str
    started: bool = False
    events: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    evals: list[tuple[int, float, float]] = field(default_factory=list)
    replicas: list[tuple[int, float]] = field(default_factory=list)
    detected: list[tuple[str, int, int]] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    saved: dict[int, str] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        match event["event"]:
            case "start":
                self.started = True
                self.events["start"] = event
            case "step":
                self.steps.append((event["step"], event["loss"], event["grad_norm"]))
            case "eval" if not event.get("replica"):
                self.evals.append((event["step"], event["loss"], event[self.metric]))
            case "replicas":
                self.replicas.append((event["step"], event["max_abs_difference"]))
            case "detect":
                self.detected.append((event["detector"], event["step"], event["rank"]))
            case "digest":
                self.digests[event["step"]] = event["resume_digest"]
            case "saved":
                self.saved[event["step"]] = event["path"]
            case "end":
                self.events["end"] = event

    def record(self, kind: str, parallel: str, training_seed: int, **values: Any) -> RunRecord:
        """The record of the run."""
        start, end = self.events.get("start", {}), self.events.get("end", {})
        return RunRecord(
            kind,
            parallel,
            training_seed,
            ended=values.pop("ended", None) or end.get("stopped") or COMPLETED,
            fingerprint=fingerprint_id(start["fingerprint"]) if start else "",
            first_step=start.get("step", 0),
            last_step=self.steps[-1][0] if self.steps else start.get("step", 0),
            steps=self.steps,
            evals=self.evals,
            replicas=self.replicas,
            detected=self.detected,
            loss=self.steps[-1][1] if self.steps else None,
            metric=self.evals[-1][2] if self.evals else None,
            max_abs_parameter=end.get("max_abs_parameter"),
            nonfinite=end.get("nonfinite"),
            state_distance=end.get("state_distance"),
            resident=end.get("resident", []),
            state_digest=end.get("state_digest", ""),
            resume_digest=end.get("resume_digest", ""),
            seconds=values.pop("seconds", None) or end.get("seconds", 0.0),
            **values,
        )


@dataclass
class DeathListener(Listener):
    """Of a run whose ranks die: it starts anew with each restart, and then tells of steps that it told of before.

    inside: ranks that die within a step, of which a part is done by then. again: steps, whole or in part, that were
    done again. began: when the run was asked for, CLOCK_MONOTONIC in seconds.
    """

    inside: frozenset[int] = frozenset()
    lost: list[tuple[int, int, float]] = field(default_factory=list)
    recovery_seconds: float = 0.0
    world: int | None = None
    again: int = 0
    began: float = field(default_factory=time.monotonic)
    _known: int = 0

    def __call__(self, event: Event) -> None:
        match event["event"]:
            case "start" if self.started:
                return
            case "step" if self.steps and event["step"] <= self.steps[-1][0]:
                self.again += 1
                return
            case "eval" if self.evals and event["step"] <= self.evals[-1][0]:
                return
            case "rank-lost":
                self.lost.append((event["rank"], event["step"], event["seconds_to_detect"]))
            case "recovered":
                self.recovery_seconds += event["seconds"]
                self.world = event["world_size"]
                broken = {rank for rank, _, _ in self.lost[self._known :]} & self.inside
                self.again += bool(broken) and event["strategy"] != "lossy"
                self._known = len(self.lost)
        super().__call__(event)

    def record(self, kind: str, parallel: str, training_seed: int, **values: Any) -> RunRecord:
        """The record of the run; its seconds are those of the whole of it, with all that was started for it."""
        return super().record(
            kind, parallel, training_seed, lost=self.lost, recovery_seconds=self.recovery_seconds,
            steps_again=self.again, world_size=self.world, seconds=time.monotonic() - self.began, **values,
        )  # fmt: skip


def listener_of(spec: Spec) -> Listener:
    """One for a run of this campaign."""
    return DeathListener(spec.metric) if spec.fault == RANK_LOSS else Listener(spec.metric)


def fingerprint_id(fingerprint: Mapping[str, str]) -> str:
    """A short name for a kind of machine; the golden folder keeps what it stands for."""
    text = json.dumps(fingerprint, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
