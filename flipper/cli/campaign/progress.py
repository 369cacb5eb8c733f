"""The live bar of a campaign: stage, runs, outcomes so far, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flipper.cli.output import printable, say

if TYPE_CHECKING:
    from flipper.campaigns.coordinator import Progress

STAGES = {"golden": "golden and control runs", "null": "null trials", "trial": "trials", "audit": "audited trials"}

QUIET_SECONDS = 30.0
"""Without a terminal, a line at most this often."""


@contextmanager
def follow(quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """What is to hear of each result: a bar on a terminal, else a line now and then, or nobody."""
    if quiet:
        yield lambda progress: None
    elif sys.stderr.isatty():
        with _bar() as hear:
            yield hear
    else:
        yield _lines()


def _lines() -> Callable[[Progress], None]:
    told: dict[str, float] = {}
    notes: set[str] = set()

    def hear(progress: Progress) -> None:
        for note in _new(progress.notes, notes):
            say(f"warning: {note}")
        now = time.monotonic()
        last = progress.done == progress.total
        if not last and now - told.get(progress.stage, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        told[progress.stage] = now
        say(f"{STAGES[progress.stage]}: {progress.done} of {progress.total}{_outcomes(progress)}")

    return hear


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[outcomes]}"),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, int] = {}
        notes: set[str] = set()

        def hear(progress: Progress) -> None:
            for note in _new(progress.notes, notes):
                bar.console.print(f"warning: {printable(note)}", markup=False, highlight=False, soft_wrap=True)
            if progress.stage not in tasks:
                tasks[progress.stage] = bar.add_task(STAGES[progress.stage], total=progress.total, outcomes="")
            bar.update(
                tasks[progress.stage],  # type: ignore[arg-type]
                completed=progress.done,
                total=progress.total,
                outcomes=_outcomes(progress).removeprefix("; "),
            )

        yield hear


def _new(notes: list[str], told: set[str]) -> list[str]:
    """Those that were not told yet, which then are."""
    found = [note for note in notes if note not in told]
    told.update(found)
    return found


def _outcomes(progress: Progress) -> str:
    if progress.stage != "trial" or not progress.outcomes:
        return ""
    from flipper.campaigns.outcomes import OUTCOMES

    return "; " + ", ".join(f"{progress.outcomes[name]} {name}" for name in OUTCOMES if progress.outcomes[name])
