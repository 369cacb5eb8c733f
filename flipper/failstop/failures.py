"""When workers fail: drawn from an exponential or Weibull distribution, or read from a trace."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from flipper.errors import UsageError
from flipper.failstop.kills import LEAST_SHAPE
from flipper.text_files import read_named

_UNITS: Final = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(ms|s|min|m|h|d)?", re.IGNORECASE)


def seconds_of(text: str, option: str) -> float:
    """A duration: a number of seconds, or one with its unit: ms, s, min (m), h, d. UsageError for another, or for 0."""
    found = _DURATION.fullmatch(text.strip())
    value = 0.0 if found is None else float(found[1]) * _UNITS[(found[2] or "s").lower()]
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {text!r} is no duration above 0: say 90s, 15min, 2h or 1.5d")
    return value


@dataclass(frozen=True)
class Failure:
    """A worker dies, so many seconds after the beginning."""

    time: float
    worker: int


class Failures(Protocol):
    """When each worker of a run fails."""

    def of(self, worker: int) -> Iterator[float]:
        """The times at which this worker, and those that take its place, fail: seconds, ascending."""


@dataclass(frozen=True)
class Drawn:
    """Independent workers whose lives follow a Weibull distribution; with shape 1 it is the exponential one.

    mtbf: seconds between failures of the whole job while it has all its workers; a worker's mean life is `workers`
    times that. Each worker draws from its own stream, so that its failures don't depend on the strategy.
    """

    mtbf: float
    workers: int
    seed: int
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not LEAST_SHAPE <= self.shape < 100:
            raise UsageError(f"--shape {self.shape:g}: the Weibull shape must be {LEAST_SHAPE:g} or more and below 100")

    def of(self, worker: int) -> Iterator[float]:
        """As Failures.of."""
        words = np.random.Philox(key=[self.seed % 2**64, worker])
        scale = self.mtbf * self.workers / math.gamma(1 + 1 / self.shape)
        time = 0.0
        while True:
            uniform = (int(words.random_raw()) >> 11) * 2.0**-53  # in [0, 1)
            time += scale * (-math.log1p(-uniform)) ** (1 / self.shape)
            yield time


@dataclass(frozen=True)
class Trace:
    """Failures as they are listed."""

    failures: Sequence[Failure]

    @classmethod
    def read(cls, path: Path, workers: int) -> Trace:
        """A CSV file with the columns `seconds` and `worker`; UsageError says which line is wrong."""
        rows = csv.DictReader(read_named(path, "--trace").splitlines())
        if not {"seconds", "worker"} <= set(rows.fieldnames or ()):
            raise UsageError(f"--trace {path}: it needs a first line with the columns seconds,worker")
        found = []
        for number, row in enumerate(rows, start=2):
            try:
                failure = Failure(float(row["seconds"]), int(row["worker"]))
            except (TypeError, ValueError):
                failure = Failure(-1, -1)
            if not (0 <= failure.time < math.inf and 0 <= failure.worker < workers):
                raise UsageError(
                    f"--trace {path}, line {number}: seconds must be a number of at least 0, worker 0 to {workers - 1}"
                )
            found.append(failure)
        return cls(tuple(sorted(found, key=lambda failure: failure.time)))

    def of(self, worker: int) -> Iterator[float]:
        """As Failures.of."""
        return (failure.time for failure in self.failures if failure.worker == worker)
