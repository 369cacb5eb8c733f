"""Workload: how much of a training step the allreduce is, by a model with every number open to change.

A chip computes a step in samples x operations / (speed x utilization) seconds. Of that a share, the overlap, can hide
communication; what the allreduce takes beyond is added to the step. Each chip keeps its samples when others fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from flipper.errors import UsageError


@dataclass(frozen=True)
class Model:
    """What is trained. parameters: as many gradients are summed. operations: floating-point ones for one sample,
    forward and backward. samples: per chip and step, by default."""

    parameters: int
    operations: float
    samples: int


MODELS: Final = {
    "resnet50": Model(25_557_032, 3 * 2 * 4.09e9, 32),
    "bert-large": Model(335_141_888, 6 * 302e6 * 512 + 3 * 4 * 24 * 512**2 * 1024, 8),
}
"""ResNet-50 (4.09e9 multiplications and additions forward, at 224x224 pixels) and BERT-large (24 layers of 1,024 units,
sequences of 512 tokens); backward counts twice as much as forward."""

GRADIENT_BYTES: Final = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Training:
    """A model trained on a mesh. speed: operations per second of a chip at best; utilization: the share of it that is
    reached; compute: seconds of a step instead of all that; overlap: share of them that can hide communication."""

    model: str
    samples: int | None = None
    dtype: str = "float32"
    speed: float = 123e12
    utilization: float = 0.4
    compute: float | None = None
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UsageError(f"no model {self.model!r}; known: {', '.join(MODELS)} (or give --bytes)")
        if self.dtype not in GRADIENT_BYTES:
            raise UsageError(f"no dtype of gradients {self.dtype!r}; known: {', '.join(GRADIENT_BYTES)}")
        if not 0 <= self.overlap <= 1 or not 0 < self.utilization <= 1:
            raise UsageError("--overlap is a share from 0 to 1, and --utilization one above 0")
        if not 0 <= self.compute_seconds < math.inf:
            raise UsageError("--compute-seconds, or what follows from --chip-speed, is no time that a step can take")

    @property
    def size(self) -> float:
        """Bytes of the gradients."""
        return float(MODELS[self.model].parameters * GRADIENT_BYTES[self.dtype])

    @property
    def samples_per_chip(self) -> int:
        """In each step."""
        return MODELS[self.model].samples if self.samples is None else self.samples

    @property
    def compute_seconds(self) -> float:
        """Of a step, without communication."""
        if self.compute is not None:
            return self.compute
        return self.samples_per_chip * MODELS[self.model].operations / (self.speed * self.utilization)

    def step(self, allreduce: float) -> float:
        """Seconds of a step whose allreduce takes so many."""
        return self.compute_seconds + max(0.0, allreduce - self.overlap * self.compute_seconds)

    def record(self, allreduce: float, intact: float, living: float) -> dict[str, object]:
        """What the row of a study says of it. living: the share of chips that survive."""
        step, before = self.step(allreduce), self.step(intact)
        return {
            "model": self.model,
            "samples_per_chip": self.samples_per_chip,
            "compute_seconds": self.compute_seconds,
            "overlap": self.overlap,
            "step_seconds": step,
            "intact_step_seconds": before,
            "step_overhead": step / before - 1,
            "throughput": living * before / step,
        }
