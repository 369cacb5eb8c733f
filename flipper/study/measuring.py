"""Measuring: what every rank runs: saves and loads in each format, timed, with training going on where there is any."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from flipper.errors import FlipperError
from flipper.study import formats
from flipper.study.formats.format import Asynchronous, Format, synced, told
from flipper.study.memory import begin_peak, evict, files_of, peak_since, settle
from flipper.study.restarting import keep
from flipper.study.spec import Combination, StudySpec
from flipper.study.subjects import Subject, emptied, spoken_for, subject_of
from flipper.training.fingerprint import fingerprint
from flipper.training.ranks import Emit, Place

WARMING: Final = 2
TIMED: Final = 8
"""Steps of training before anything is saved: those that aren't counted, and those whose median is a step's length."""

Values = dict[str, float | None]


def measure_rank(spec: StudySpec, ranks: int, folder: Path, place: Place, emit: Emit) -> None:
    """All combinations of a number of ranks; rank 0 emits "subject", then "measured" for each save and load.

    folder: where checkpoints are written, and where one of each kind is kept for `restarting`.
    """
    # Else every torch.empty is filled, which no training of a user's pays for.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    subject = subject_of(spec, ranks, place)
    combinations = list(spec.combinations(ranks))
    found = {name: formats.get(name) for name in spec.formats}
    for each in found.values():
        each.prepare(subject.grid)
    length = _length_of_a_step(subject)
    if subject.grid.rank == 0:
        machine = fingerprint(subject.grid.device.type)
        emit({"event": "subject", "step_seconds": length, "batches": subject.batches, "machine": machine})
    if spec.recipe is not None:
        keep(spec, ranks, folder, place, combinations)
    for repeat in range(spec.repeat + 1):  # the first isn't counted
        for number, combination in enumerate(combinations):
            path = folder / f"{ranks}-{repeat}-{number}"
            trial = Trial(subject, found[combination.format], combination, path, length)
            values = trial.measure()
            if subject.grid.rank == 0:
                emit({"event": "measured", "combination": number, "repeat": repeat, "values": values})


def _length_of_a_step(subject: Subject) -> float | None:
    """The median of some steps; None where nothing is trained."""
    lengths = [subject.step() for _ in range(WARMING + TIMED)][WARMING:]
    known = [length for length in lengths if length is not None]
    return statistics.median(known) if known else None


class Trial:
    """One save and its loads."""

    def __init__(
        self, subject: Subject, format: Format, combination: Combination, path: Path, length: float | None
    ) -> None:
        """length: seconds of a step of training; None where there is none."""
        self.subject, self.format, self.combination, self.path, self.length = subject, format, combination, path, length
        self.grid = subject.grid

    def measure(self) -> Values:
        """Seconds and bytes: of every quantity the value of the rank that has most of it; the file is gone then."""
        with told(self.combination.format, self.path.parent):
            mine = self._save()
            mine["load_seconds"] = self._load()
            self._on_rank_0(lambda: synced(self.path))
        cold = self._on_rank_0(lambda: evict(self.path))
        mine["cold_load_seconds"] = self._load() if cold else None
        mine["bytes"] = sum(file.stat().st_size for file in files_of(self.path))
        self._remove()
        everyone = self.grid.everyone(mine)
        return {name: _most([each[name] for each in everyone]) for name in mine}

    def _save(self) -> Values:
        settle()
        self._meet()
        before = begin_peak()
        began = time.perf_counter()
        shards = spoken_for(self.subject, self.combination.content)
        if self.combination.mode == "async":
            saved, stalled = self._save_in_background(shards, began)
        else:
            self.format.save(shards, self.grid, self.path, self.combination.fsync)
            saved = stalled = time.perf_counter() - began
        return {"save_seconds": saved, "stall_seconds": stalled, "peak_bytes": peak_since(before)}

    def _save_in_background(self, shards: Any, began: float) -> tuple[float, float]:
        """Seconds until all is saved, and seconds that training lost: until it could go on, and by slower steps."""
        ended: list[float] = []
        pending = cast(Asynchronous, self.format).save_async(shards, self.grid, self.path, self.combination.fsync)
        pending.add_done_callback(lambda _: ended.append(time.perf_counter()))
        blocked = time.perf_counter() - began
        slower = 0.0
        while self.length is not None and not all(self.grid.everyone(bool(ended))):
            length = self.subject.step()
            slower += (length or 0.0) - self.length
        pending.result()
        while not ended:  # what waits for the result is told before the callbacks
            time.sleep(1e-5)
        return ended[0] - began, blocked + max(0.0, slower)

    def _load(self) -> float:
        into = emptied(self.subject.held(self.combination.content))
        self._meet()
        began = time.perf_counter()
        self.format.load(into, self.grid, self.path)
        return time.perf_counter() - began

    def _meet(self) -> None:
        if self.grid.world > 1:
            dist.barrier()

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """What rank 0's work gives, or raises, on every rank."""
        said: Any = None
        if self.grid.rank == 0:
            try:
                said = work()
            except (FlipperError, OSError) as error:
                said = error
        said = self.grid.everyone(said)[0]
        if isinstance(said, Exception):
            raise said
        return said

    def _remove(self) -> None:
        self._meet()
        if self.grid.rank == 0:
            shutil.rmtree(self.path) if self.path.is_dir() else self.path.unlink(missing_ok=True)


def _most(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
