"""Mesh: the page and the picture of a study of allreduce on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flipper.checkpoints.output import atomic_output
from flipper.errors import UsageError
from flipper.mesh.picture import document, picture, titled
from flipper.mesh.study import Case

MOST: int = 12
"""Pictures of one file."""


def write_figure(cases: Sequence[Case], path: Path) -> Path:
    """Draw the schedules as SVG, one below the other; replaces what is there. Raises UsageError, OutputError."""
    drawn = [case for case in cases if case.schedule is not None]
    if not drawn or len(drawn) > MOST:
        raise UsageError(f"--figure draws 1 to {MOST} schedules, and here are {len(drawn)}; ask for fewer at once")
    pictures = [picture(case.schedule, titled(case.schedule, case.question.holes)) for case in drawn
                if case.schedule is not None]  # fmt: skip
    with atomic_output(path, force=True) as partial:
        partial.write_text(document(pictures), "utf-8")
    return path
