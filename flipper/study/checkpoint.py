"""The study of checkpoints: launches the ranks that measure, and those that restart, and puts the rows together."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flipper.errors import UsageError
from flipper.study.formats import check_installed
from flipper.study.memory import free_bytes
from flipper.study.rows import Measured
from flipper.study.spec import StudySpec
from flipper.training.launch import run_ranks
from flipper.training.ranks import Emit, Place
from flipper.training.spec import Event

Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Study:
    """What a study came to.

    rows: one a combination, with the keys rows.COLUMNS; seconds, bytes. step_seconds: of a step of training, by number
    of ranks; none where nothing is trained. machine: what the ranks ran on. filesystem: what was written to.
    """

    spec: StudySpec
    rows: list[dict[str, Any]]
    step_seconds: dict[int, float]
    machine: dict[str, str]
    filesystem: str


def study(spec: StudySpec, on_event: Listener | None = None, *, verbose: bool = False) -> Study:
    """Measure every combination, and restart from every kind of checkpoint of a recipe.

    on_event: called with "measured" for each save and load, "restarted" for each kind of checkpoint, as they come.
    Checkpoints go to a temporary folder, in spec.folder if there is one, and are gone at the end.
    Raises UsageError, CheckpointError, MismatchError, OutputError, or TrainingError when a rank fails.
    """
    for name in spec.formats:
        check_installed(name)
    _check_room(spec)
    rows: list[dict[str, Any]] = []
    steps: dict[int, float] = {}
    machine: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="flipper-study-", dir=spec.folder) as folder:
        for ranks in spec.ranks:
            measured = _measured(spec, ranks, Path(folder), on_event, verbose)
            combinations = enumerate(spec.combinations(ranks))
            rows += [measured.row(number, combination, spec.mtbf) for number, combination in combinations]
            machine = measured.machine
            if measured.step_seconds is not None:
                steps[ranks] = measured.step_seconds
        return Study(spec, rows, steps, machine, _filesystem(Path(folder)))


def _check_room(spec: StudySpec) -> None:
    """Raise UsageError for made-up tensors that don't fit into the memory that is free."""
    free = free_bytes()
    if spec.synthetic is None or free is None:
        return
    copies = max(ranks if spec.parallel(ranks).replicated else 1 for ranks in spec.ranks)
    needed = 6 * copies * spec.synthetic  # Adam's two moments beside the parameters, and all of it again when loaded
    if needed > free:
        raise UsageError(
            f"--synthetic: {spec.synthetic:,} bytes of parameters with Adam's state, of which there are two while they "
            f"are loaded, take {needed:,} bytes of memory; {free:,} are free here"
        )


def _measured(spec: StudySpec, ranks: int, folder: Path, on_event: Listener | None, verbose: bool) -> Measured:
    measured = Measured()

    def hear(event: Event) -> None:
        match event["event"]:
            case "subject":
                measured.step_seconds, measured.batches = event["step_seconds"], event["batches"]
                measured.machine = event["machine"]
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


def _filesystem(folder: Path) -> str:
    """The kind of file system that a folder lies on, as the kernel calls it; "" where it doesn't say."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return ""
    above = {str(each) for each in (folder.resolve(), *folder.resolve().parents)}
    return max(((where, kind) for _, where, kind, *_ in mounts if where in above), key=lambda m: len(m[0]))[1]


def _measure(spec: StudySpec, ranks: int, folder: Path, place: Place, emit: Emit) -> None:
    from flipper.study.measuring import measure_rank  # imports torch

    measure_rank(spec, ranks, folder, place, emit)


def _restart(spec: StudySpec, ranks: int, folder: Path, place: Place, emit: Emit) -> None:
    from flipper.study.restarting import restart_rank

    restart_rank(spec, ranks, folder, place, emit)
