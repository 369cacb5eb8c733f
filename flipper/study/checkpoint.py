"""The study of checkpoints: launches the ranks that measure, and those that restart, and puts the rows together."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flipper.study.formats import check_installed
from flipper.study.rows import Measured
from flipper.study.spec import StudySpec
from flipper.training.launch import run_ranks
from flipper.training.ranks import Emit, Place
from flipper.training.spec import Event

Listener = Callable[[Event], None]


def study(spec: StudySpec, on_event: Listener | None = None, *, verbose: bool = False) -> list[dict[str, Any]]:
    """One row a combination: see rows.COLUMNS; seconds, bytes.

    on_event: called with "measured" for each save and load, "restarted" for each kind of checkpoint, as they come.
    Checkpoints go to a temporary folder, in spec.folder if there is one, and are gone at the end.
    Raises UsageError, CheckpointError, MismatchError, OutputError, or TrainingError when a rank fails.
    """
    for name in spec.formats:
        check_installed(name)
    rows = []
    with tempfile.TemporaryDirectory(prefix="flipper-study-", dir=spec.folder) as folder:
        for ranks in spec.ranks:
            measured = _measured(spec, ranks, Path(folder), on_event, verbose)
            combinations = enumerate(spec.combinations(ranks))
            rows += [measured.row(number, combination, spec.mtbf) for number, combination in combinations]
    return rows


def _measured(spec: StudySpec, ranks: int, folder: Path, on_event: Listener | None, verbose: bool) -> Measured:
    measured = Measured()

    def hear(event: Event) -> None:
        match event["event"]:
            case "subject":
                measured.step_seconds, measured.batches = event["step_seconds"], event["batches"]
            case "measured" if event["repeat"]:
                measured.samples.setdefault(event["combination"], []).append(event["values"])
            case "restarted":
                kind = event["combination"]
                measured.missing[kind.format, kind.content, kind.mode] = event["missing"]
        if on_event is not None:
            on_event(event)

    for body in (_measure, _restart) if spec.recipe is not None else (_measure,):
        run_ranks(functools.partial(body, spec, ranks, folder), ranks, hear, device=spec.device, timeout=spec.timeout,
                  verbose=verbose)  # fmt: skip
    return measured


def _measure(spec: StudySpec, ranks: int, folder: Path, place: Place, emit: Emit) -> None:
    from flipper.study.measuring import measure_rank  # imports torch

    measure_rank(spec, ranks, folder, place, emit)


def _restart(spec: StudySpec, ranks: int, folder: Path, place: Place, emit: Emit) -> None:
    from flipper.study.restarting import restart_rank

    restart_rank(spec, ranks, folder, place, emit)
