"""What things take: the cost model by which the simulator charges time."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from flipper.errors import UsageError, shortened
from flipper.text_files import read_named
from flipper.toml import parse

MOST: Final = 1e12
"""Seconds of one cost, and of what a bandwidth makes of one byte: sums of more come to infinity, and so to nothing."""


@dataclass(frozen=True)
class Costs:
    """Seconds, but for bandwidth.

    step: of a worker's forward and backward pass beside what its samples take, each of them `sample`.
    latency, bandwidth: of one message between two workers, and its bytes a second. An allreduce of n bytes among W is
    charged as 2 ceil(log2 W) latency + 2 (W-1)/W n / bandwidth, which recursive halving and doubling takes (Thakur,
    Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).
    snapshot: copying the state in memory before a step. detect: from a death until the others notice. regroup: until
    they are in a new group. respawn: starting all workers anew. write, read: a checkpoint.
    """

    step: float = 0.0
    sample: float = 0.0
    latency: float = 0.0
    bandwidth: float = math.inf
    snapshot: float = 0.0
    detect: float = 0.0
    regroup: float = 0.0
    respawn: float = 0.0
    write: float = 0.0
    read: float = 0.0

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read a TOML file with some of the fields; UsageError names what is wrong."""
        values = parse(read_named(path, "--costs"))
        known = [field.name for field in fields(cls)]
        for name, value in values.items():
            if name not in known:
                raise UsageError(f"--costs {path}: no cost {name!r}; known: {', '.join(known)}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise UsageError(f"--costs {path}: {name} must be a number of at least 0, not {value!r}")
            if name != "bandwidth" and value > MOST:
                raise UsageError(f"--costs {path}: {name} is {shortened(str(value))}; at most {MOST:g} seconds")
        if values.get("bandwidth") == 0:
            raise UsageError(f"--costs {path}: bandwidth must be above 0")
        if (bandwidth := values.get("bandwidth", MOST)) < 1 / MOST:
            raise UsageError(f"--costs {path}: bandwidth is {bandwidth:g}; at least {1 / MOST:g} bytes a second")
        return cls(**values)

    def text(self) -> str:
        """The file that `load` reads."""
        return "".join(f"{name} = {value:.6g}\n" for name, value in asdict(self).items())

    def allreduce(self, size: int, workers: int) -> float:
        """Seconds to average so many bytes over the workers."""
        rounds = (workers - 1).bit_length()
        return 2 * rounds * self.latency + 2 * (workers - 1) / workers * size / self.bandwidth

    def bucket_ends(self, samples: int, sizes: list[int], workers: int) -> list[float]:
        """When each bucket of a step is averaged, from the step's beginning; the last end is the step's length.

        samples: of the worker that has most. sizes: bytes of each bucket, in order. A bucket's gradients are there when
        the backward pass, two thirds of the computation, has gone through its part; then it waits for the one before.
        """
        compute = self.step + self.sample * samples
        ends: list[float] = []
        passed = 0
        for size in sizes:
            passed += size
            there = compute * (1 / 3 + 2 / 3 * passed / sum(sizes))
            ends.append(max(there, ends[-1] if ends else 0.0) + self.allreduce(size, workers))
        return ends
