"""Rows: what was measured as a table: medians with the least and the most beside them, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flipper.study.spec import Combination
from flipper.training.interval import young_daly

MEASURED: Final = ("save_seconds", "load_seconds", "cold_load_seconds", "stall_seconds", "peak_bytes")

COLUMNS: Final = (
    "format", "content", "layout", "ranks", "mode", "fsync", "bytes",
    *(f"{name}{end}" for name in MEASURED for end in ("", "_low", "_high")),
    "epoch_share", "deterministic", "missing", "interval_seconds", "repeats",
)  # fmt: skip


@dataclass
class Measured:
    """What became known of a number of ranks.

    step_seconds, batches: of a step of training, and steps of an epoch; None where nothing is trained.
    machine: what the ranks ran on, as fingerprint.py describes it.
    samples: by combination, one of each repeat. missing: by kind of checkpoint, what a run from it lacked.
    """

    step_seconds: float | None = None
    batches: int | None = None
    machine: dict[str, str] = field(default_factory=dict)
    samples: dict[int, list[Mapping[str, float | None]]] = field(default_factory=dict)
    missing: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)

    def row(self, number: int, combination: Combination, mtbf: float | None) -> dict[str, Any]:
        """The row of a combination, which has this number."""
        samples = self.samples[number]
        missing = self.missing.get((combination.format, combination.content, combination.mode))
        row: dict[str, Any] = {
            "format": combination.format,
            "content": combination.content,
            "layout": combination.layout,
            "ranks": combination.ranks,
            "mode": combination.mode,
            "fsync": combination.fsync,
            "bytes": statistics.median_low(sample["bytes"] or 0 for sample in samples),
        }
        for name in MEASURED:
            row |= _spread(name, [sample[name] for sample in samples])
        stall = row["stall_seconds"]
        epoch = None if self.step_seconds is None or self.batches is None else self.step_seconds * self.batches
        return row | {
            "epoch_share": None if not epoch else stall / epoch,
            "deterministic": None if missing is None else not missing,
            "missing": missing,
            "interval_seconds": None if mtbf is None else young_daly(stall, mtbf),
            "repeats": len(samples),
        }


def _spread(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """The median, the least and the most; nothing where one wasn't measured."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return {f"{name}{end}": None for end in ("", "_low", "_high")}
    middle = statistics.median_low if name.endswith("bytes") else statistics.median  # bytes are whole
    return {name: middle(known), f"{name}_low": min(known), f"{name}_high": max(known)}
