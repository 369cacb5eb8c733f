"""Choices: what a run whose ranks die may be told, by name; campaign files are read without all else."""

from __future__ import annotations

from typing import Final

RECOVERIES: Final = ("restart", "rollback", "lossy")
WORLD_BATCHES: Final = ("fixed", "per-rank")
WORLD_RATES: Final = ("keep", "linear")
LOST_SHARES: Final = ("drop", "zero")
