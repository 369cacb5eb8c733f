"""Reach: which copies of an element a live fault hits."""

from __future__ import annotations

from dataclasses import dataclass

from flipper.errors import UsageError
from flipper.training.layouts import Parallel


@dataclass(frozen=True)
class Reach:
    """Which copies a fault hits: "all", "one", or that of one "rank"."""

    kind: str
    rank: int = 0

    @staticmethod
    def parse(text: str, parallel: Parallel) -> Reach:
        """Read `all`, `one` or `rank:R`; raises UsageError."""
        kind, _, number = text.partition(":")
        if text in ("all", "one"):
            return Reach(text)
        if kind != "rank" or not (number.isascii() and number.isdigit()):
            raise UsageError(f"--reach: {text!r} is none of all, one, rank:R")
        if int(number) >= parallel.ranks:
            raise UsageError(f"--reach: {parallel} has no rank {number}; its ranks are 0 to {parallel.ranks - 1}")
        return Reach(kind, int(number))
