"""The coordinator: hands a campaign's runs to an executor, in order, and stores what comes back."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from flipper.campaigns import runs
from flipper.campaigns.cells import Cell, Start, pairs_in_turn, start_of, starts
from flipper.campaigns.folder import Campaign
from flipper.campaigns.outcomes import Band, Judgement, band_of, bands, golden_key, judge
from flipper.campaigns.record import COMPLETED, CRASH, RunRecord
from flipper.campaigns.store import Store
from flipper.errors import FlipperError, TrainingError
from flipper.training.layouts import Parallel

AHEAD: Final = 2
"""Runs that wait at the executor for each one that it can make at once."""

Label = tuple[str, Cell | None, int]


@dataclass
class Progress:
    """How far a campaign is. stage: golden, null, trial or audit; done, total: runs of this stage; outcomes: so far."""

    stage: str = ""
    done: int = 0
    total: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    ended_early: int = 0


@dataclass
class _Waiting:
    """A run at the executor: what it is, and who else waits for its result."""

    kind: str
    cell: Cell | None
    trial: int
    start: Start
    plan: str = ""
    same: list[tuple[Cell, int]] = field(default_factory=list)


class Coordinator:
    """Runs a campaign. One process, one writer.

    executor: any concurrent.futures.Executor; one that has `submit_ranks` is told how many ranks a run has. at_once:
    runs that it can make at once. shard: (number from 1, how many): only every how-many-th trial. keep: altered files
    stay. audit: the part of the shortened trials that is run in full as well. lost: whether an error of the executor
    means that a run's worker died, each time that it was tried.
    """

    def __init__(
        self,
        campaign: Campaign,
        store: Store,
        executor: Executor,
        *,
        at_once: int,
        shard: tuple[int, int] | None = None,
        keep: bool = False,
        audit: float = 0.0,
        lost: Callable[[BaseException], bool] = lambda error: False,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.campaign, self.store, self.executor = campaign, store, executor
        self.at_once, self.shard, self.keep, self.audit, self.lost = at_once, shard, keep, audit, lost
        self.progress = Progress()
        self._on_progress = on_progress
        self._goldens: dict[tuple[Any, ...], RunRecord] = {}
        self._bands: dict[str, Band] = {}
        self._clean: dict[Start, Path] = {}

    def run(self) -> Progress:
        """Run all that is not there yet; raises the first error, after storing what had finished."""
        began = time.monotonic()
        before = float(self.store.facts().get("seconds", 0.0))
        try:
            self._controls()
            self._nulls()
            self._trials()
            self._audits()
        finally:
            self.store.set_fact("seconds", before + time.monotonic() - began)
        return self.progress

    def judged(self, record: RunRecord) -> Judgement:
        """What a trial comes to, by the thresholds as they stand."""
        spec = self.campaign.spec
        return judge(record, self._goldens[golden_key(record)], band_of(spec, self._bands, record.parallel), spec)

    def _controls(self) -> None:
        wanted = starts(self.campaign.spec, self.campaign.cells)
        self._begin("golden", len(wanted))
        self._each(self._submit(_Waiting("golden", None, 0, start), runs.run_golden, start) for start in wanted)
        for cell in self.campaign.cells:  # what can't be drawn is said before hours of trials
            self._plan(cell, 0)

    def _nulls(self) -> None:
        spec = self.campaign.spec
        if spec.tolerance is None:
            every = starts(spec, self.campaign.cells)
            layouts: dict[tuple[str, str | None], list[Start]] = {}
            for start in every:
                layouts.setdefault((start.parallel, start.checkpoint), []).append(start)
            numbered = [
                (of_layout[number % len(of_layout)], number)
                for number in range(spec.null_trials)
                for of_layout in layouts.values()
            ]
            there = {(r.parallel, r.checkpoint, r.trial) for r in self.store.runs("null")}
            todo = [(s, n) for s, n in numbered if (s.parallel, s.checkpoint, n) not in there]
            self._begin("null", len(numbered), len(numbered) - len(todo))
            self._each(self._submit(_Waiting("null", None, n, s), runs.run_null, s, n) for s, n in todo)
        self._bands = bands(spec, self.store.runs("null"), self._goldens)

    def _trials(self) -> None:
        limits = {cell.number: self._limit(cell) for cell in self.campaign.cells}
        mine = [pair for pair in pairs_in_turn(self.campaign.cells, limits) if self._in_shard(pair[1])]
        there = self.store.finished()
        self._begin("trial", len(mine), sum(trial in there.get(cell.number, ()) for cell, trial in mine))
        self.progress.outcomes.update(self.judged(record).outcome for record in self.store.runs("trial"))
        at_work: dict[str, _Waiting] = {}

        def todo() -> Iterator[Future[Any] | None]:
            for cell, trial in mine:
                if trial not in there.get(cell.number, ()):
                    yield self._submit_trial(cell, trial, at_work)

        self._each(todo())

    def _submit_trial(self, cell: Cell, trial: int, at_work: dict[str, _Waiting]) -> Future[Any] | None:
        """Hand on a trial, unless one with the same plan has a result or is at work: then that one's is taken."""
        key = self._plan(cell, trial)
        if (same := self.store.of_plan(key)) is not None:
            self._keep_result(_reused(same, cell, trial))
            return None
        if key in at_work:
            at_work[key].same.append((cell, trial))
            return None
        waiting = _Waiting("trial", cell, trial, start_of(self.campaign.spec, cell, trial), key)
        at_work[key] = waiting
        return self._submit(waiting, runs.run_trial, cell, trial, False, self.keep)

    def _audits(self) -> None:
        """Run a sample of the shortened trials in full; all must come to the same."""
        short = [r for r in self.store.runs("trial") if _shortened(r)]
        there = {(r.cell, r.trial) for r in self.store.runs("audit")}
        sample = [r for r in short if _share(r) < self.audit]
        todo = [r for r in sample if (r.cell, r.trial) not in there]
        if sample:
            self._begin("audit", len(sample), len(sample) - len(todo))
        cells = {cell.number: cell for cell in self.campaign.cells}
        self._each(
            self._submit(
                _Waiting("audit", cells[r.cell], r.trial, start_of(self.campaign.spec, cells[r.cell], r.trial)),
                runs.run_trial, cells[r.cell], r.trial, True,
            )
            for r in todo
        )  # fmt: skip
        found = {(r.cell, r.trial): r for r in self.store.runs("audit")}
        for record in short:
            full = found.get((record.cell, record.trial))
            if full is not None and (problem := _disagree(record, full)) is not None:
                raise TrainingError(f"audit: cell {record.cell}, trial {record.trial}, {problem}; report this")

    def _limit(self, cell: Cell) -> int:
        if not self.campaign.spec.census:
            return cell.trials
        from flipper.campaigns.census import bits_of

        return bits_of(self._clean[start_of(self.campaign.spec, cell, 0)], cell.model)

    def _in_shard(self, trial: int) -> bool:
        return self.shard is None or trial % self.shard[1] == self.shard[0] - 1

    def _plan(self, cell: Cell, trial: int) -> str:
        start = start_of(self.campaign.spec, cell, trial)
        try:
            plan = runs.plan_of(self.campaign, cell, trial, self._clean[start])
        except FlipperError as error:
            error.args = (f"cell {cell.number} ({cell.label}): {error}", *error.args[1:])
            raise
        return runs.plan_key(plan, cell, start.training_seed)

    def _submit(self, waiting: _Waiting, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        submit = getattr(self.executor, "submit_ranks", None)
        if submit is not None:
            slots = getattr(self.executor, "slots", 1)
            ranks = 1 if self.campaign.spec.commands else Parallel.parse(waiting.start.parallel).ranks
            future: Future[Any] = submit(min(ranks, slots), work, self.campaign, *arguments)
        else:
            future = self.executor.submit(work, self.campaign, *arguments)
        self._at_work[future] = waiting
        return future

    def _each(self, futures: Iterable[Future[Any] | None]) -> None:
        """Hand on the runs as there is room for them, and store each result; on an error hand on no more."""
        self._at_work: dict[Future[Any], _Waiting] = {}
        source = iter(futures)
        more = True
        try:
            while more or self._at_work:
                while more and len(self._at_work) < self.at_once * AHEAD:
                    more = next(source, self) is not self
                done, _ = wait(self._at_work, return_when=FIRST_COMPLETED)
                for future in done:
                    self._take(future)
        except BaseException:
            self._let_finish()
            raise

    def _let_finish(self) -> None:
        """Store what is done when an error ends the campaign, and call off the rest."""
        for future in list(self._at_work):
            if not future.done():
                future.cancel()
            elif not future.cancelled() and future.exception() is None:
                self._take(future)

    def _take(self, future: Future[Any]) -> None:
        waiting = self._at_work.pop(future)
        try:
            records = future.result()
        except CancelledError:
            return
        except Exception as error:
            if not self.lost(error) or waiting.kind != "trial":
                raise self._told(waiting, error) from error
            records = (self._crashed(waiting, error),)
        for record in records:
            if record.kind == "golden":
                self._goldens[golden_key(record)] = record
                home = self.campaign.folder.golden(record.fingerprint, record.parallel, record.training_seed)
                self._clean.setdefault(waiting.start, next(home.glob("clean.*")))
        self._keep_result(*records)
        for cell, trial in waiting.same:
            self._keep_result(_reused(records[-1], cell, trial))

    def _keep_result(self, *records: RunRecord) -> None:
        self.store.add(*records)
        record = records[-1]
        self.progress.done += 1
        if record.kind == "trial":
            self.progress.outcomes[self.judged(record).outcome] += 1
            self.progress.reused += record.reused is not None
            self.progress.ended_early += record.ended != COMPLETED and record.error is None
        self._on_progress(self.progress)

    def _crashed(self, waiting: _Waiting, error: Exception) -> RunRecord:
        assert waiting.cell is not None
        golden = next(g for g in self._goldens.values() if g.parallel == waiting.start.parallel)
        return RunRecord(
            "trial", waiting.start.parallel, waiting.start.training_seed, cell=waiting.cell.number,
            trial=waiting.trial, ended=CRASH, error=f"its worker died: {error}", fingerprint=golden.fingerprint,
            plan=waiting.plan, reach=waiting.cell.reach,
        )  # fmt: skip

    def _told(self, waiting: _Waiting, error: Exception) -> Exception:
        """The error with the run that it belongs to."""
        if not isinstance(error, FlipperError):
            return error
        what = "" if waiting.cell is None else f"cell {waiting.cell.number}, trial {waiting.trial}: "
        error.args = (f"{what}{error}", *error.args[1:])
        return error

    def _begin(self, stage: str, total: int, done: int = 0) -> None:
        self.progress.stage, self.progress.total, self.progress.done = stage, total, done
        self._on_progress(self.progress)


def _shortened(record: RunRecord) -> bool:
    """Whether a trial has a result that it didn't run to the end for."""
    return (record.ended != COMPLETED and record.error is None) or record.reused is not None


def _reused(record: RunRecord, cell: Cell, trial: int) -> RunRecord:
    """A trial's record with the result of another that has the same plan."""
    return replace(record, cell=cell.number, trial=trial, reused=(record.cell, record.trial), seconds=0.0)


def _share(record: RunRecord) -> float:
    """A number in [0, 1) that the trial has for ever, so that the same are audited each time."""
    digest = hashlib.sha256(f"audit\0{record.cell}\0{record.trial}".encode()).digest()
    return int.from_bytes(digest[:6], "little") / (1 << 48)


def _disagree(short: RunRecord, full: RunRecord) -> str | None:
    """How a shortened trial differs from the same in full; None where they agree."""
    if short.ended == "non-finite":
        finite = full.loss is not None and full.loss == full.loss and abs(full.loss) != float("inf")
        return "stopped as non-finite, has a finite loss in full" if finite else None
    if (short.state_digest, short.resume_digest) != (full.state_digest, full.resume_digest):
        return f"was taken as {short.ended}, and ends in another state in full"
    return None
