"""The coordinator: hands a campaign's runs to an executor, in order, and stores what comes back."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from flipper.campaigns.cells import Cell, Start, pairs_in_turn, start_of, starts
from flipper.campaigns.folder import Campaign
from flipper.campaigns.outcomes import Band, Judgement, band_of, bands, golden_key, judge
from flipper.campaigns.record import COMPLETED, CRASH, HANG, REFUSED, RunRecord
from flipper.campaigns.runner import runner_of
from flipper.campaigns.scratch import in_scratch
from flipper.campaigns.store import Store
from flipper.errors import EndedError, FlipperError, TrainingError
from flipper.training.layouts import Parallel

AHEAD: Final = 2
"""Runs that wait at the executor for each one that it can make at once."""

Label = tuple[str, Cell | None, int]


@dataclass
class Progress:
    """How far a campaign is. stage: golden, null, trial or audit; done, total: runs of this stage; outcomes: so far.

    notes: what the user should hear of the controls.
    """

    stage: str = ""
    done: int = 0
    total: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    ended_early: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class _Waiting:
    """A run at the executor: what it is, and who else waits for its result.

    call: the function that makes it, and its arguments. alone: nothing else is at the executor meanwhile.
    """

    kind: str
    cell: Cell | None
    trial: int
    start: Start
    plan: str = ""
    same: list[tuple[Cell, int]] = field(default_factory=list)
    call: tuple[Any, ...] = ()
    alone: bool = False

    @property
    def label(self) -> str:
        """For error messages."""
        if self.cell is None:
            return f"{self.kind} run of {self.start.label}"
        return f"cell {self.cell.number}, trial {self.trial}"


class Coordinator:
    """Runs a campaign. One process, one writer.

    executor: any concurrent.futures.Executor; one that has `submit_ranks` is told how many ranks a run has. at_once:
    runs that it can make at once, or what tells that when asked. shard: (number from 1, how many): only every
    how-many-th trial and null trial. keep: altered files stay. audit: the part of the shortened trials that is run in
    full as well. lost: whether an error of the executor means that a run's worker died, each time that it was tried.
    Such a run is tried once more with nothing beside it: only a trial that kills its worker then has crashed.
    """

    def __init__(
        self,
        campaign: Campaign,
        store: Store,
        executor: Executor,
        *,
        at_once: int | Callable[[], int],
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
        self._golden_of: dict[Start, RunRecord] = {}
        self._compared: set[Start] = set()
        self._inexact: set[Start] = set()
        self._noted: set[str] = set()
        self._runs = runner_of(campaign.spec)
        self._harmful: dict[int, dict[int, bool]] = {}  # by cell and trial

    def run(self) -> Progress:
        """Run all that is not there yet; raises the first error, after storing what had finished."""
        began = time.monotonic()
        before = float(self.store.facts().get("seconds", 0.0))
        self._goldens = {golden_key(golden): golden for golden in self.store.runs("golden")}
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
        wanted = self._starts()
        self._begin("golden", len(wanted))
        self._each(self._submit(_Waiting("golden", None, 0, start), self._runs.run_golden, start) for start in wanted)
        for cell in self.campaign.cells:  # what can't be drawn is said before hours of trials
            trials = self._limit(cell) if self.campaign.spec.census else cell.trials
            if self._first < trials or not trials:
                self._plan(cell, self._first)

    def _starts(self) -> list[Start]:
        """What the runs of this campaign, or of its shard, start from.

        Each shard begins elsewhere, so that shards that start together, which share the folder of golden runs, seldom
        make the same one.
        """
        spec, cells = self.campaign.spec, self.campaign.cells
        if self.shard is None:
            return starts(spec, cells)
        count = self.shard[1]
        turns = len(spec.training_seeds)  # after which the same seeds come again
        needed = {start for start, _ in self._null_trials()}
        for cell in cells:
            last = self._first + turns * count if spec.census else cell.trials
            needed |= {start_of(spec, cell, trial) for trial in islice(range(self._first, last, count), turns)}
        found = [start for start in starts(spec, cells) if start in needed]
        begin = len(found) * self._first // count
        return found[begin:] + found[:begin]

    def _null_trials(self) -> list[tuple[Start, int]]:
        """The null trials of this campaign, or of its shard: where each starts, and its number."""
        spec = self.campaign.spec
        layouts: dict[tuple[str, str | None, str], list[Start]] = {}
        for start in starts(spec, self.campaign.cells):
            layouts.setdefault((start.parallel, start.checkpoint, start.setting), []).append(start)
        return [
            (of_layout[number % len(of_layout)], number)
            for number in range(spec.null_trials if spec.tolerance is None else 0)
            if self._in_shard(number)
            for of_layout in layouts.values()
        ]

    def _nulls(self) -> None:
        spec = self.campaign.spec
        if spec.tolerance is None:
            numbered = self._null_trials()
            there = {(r.parallel, r.checkpoint, r.settings, r.trial) for r in self.store.runs("null")}
            todo = [(s, n) for s, n in numbered if (s.parallel, s.checkpoint, s.setting, n) not in there]
            self._begin("null", len(numbered), len(numbered) - len(todo))
            self._each(self._submit(_Waiting("null", None, n, s), self._runs.run_null, s, n) for s, n in todo)
        self._bands = bands(spec, self.store.runs("null"), self._goldens)

    def _trials(self) -> None:
        for record in self.store.runs("trial"):
            self._count(record)
        limits: dict[int, int] = {}
        while (wanted := {cell.number: self._limit(cell) for cell in self.campaign.cells}) != limits:
            limits = wanted  # with a margin, as many as up to each cell's next look
            self._run_up_to(limits)

    def _run_up_to(self, limits: dict[int, int]) -> None:
        """Run the trials that each cell lacks of its first so many."""
        mine = [pair for pair in pairs_in_turn(self.campaign.cells, limits) if self._in_shard(pair[1])]
        there = self._harmful
        todo = [(cell, trial) for cell, trial in mine if trial not in there.get(cell.number, ())]
        self._begin("trial", len(mine), len(mine) - len(todo))
        at_work: dict[str, _Waiting] = {}
        self._each(self._submit_trial(cell, trial, at_work) for cell, trial in todo)

    def _submit_trial(self, cell: Cell, trial: int, at_work: dict[str, _Waiting]) -> Future[Any] | None:
        """Hand on a trial, unless one with the same plan has a result or is at work: then that one's is taken."""
        key = self._plan(cell, trial)
        if (same := self.store.of_plan(key)) is not None:
            self._keep_result(_reused(same, cell, trial))
            return None
        if key and key in at_work:
            at_work[key].same.append((cell, trial))
            return None
        waiting = _Waiting("trial", cell, trial, start_of(self.campaign.spec, cell, trial), key)
        at_work[key] = waiting
        return self._submit(waiting, self._runs.run_trial, cell, trial, False, self.keep)

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
                self._runs.run_trial, cells[r.cell], r.trial, True,
            )
            for r in todo
        )  # fmt: skip
        found = {(r.cell, r.trial): r for r in self.store.runs("audit")}
        for record in short:
            full = found.get((record.cell, record.trial))
            if full is not None and (problem := _disagree(record, full)) is not None:
                raise TrainingError(f"audit: cell {record.cell}, trial {record.trial}, {problem}; report this")

    def _limit(self, cell: Cell) -> int:
        """How many trials of a cell are wanted, as far as is known."""
        spec = self.campaign.spec
        if spec.margin is not None:
            from flipper.campaigns.stopping import plan_for, trials_wanted

            return trials_wanted(plan_for(spec), self._harmful.get(cell.number, {}))
        if not spec.census:
            return cell.trials
        from flipper.campaigns.census import bits_of

        return bits_of(self._clean[start_of(spec, cell, self._first)], cell.model)

    @property
    def _first(self) -> int:
        """The first trial of the shard, or of all."""
        return 0 if self.shard is None else self.shard[0] - 1

    def _in_shard(self, trial: int) -> bool:
        return self.shard is None or trial % self.shard[1] == self._first

    def _plan(self, cell: Cell, trial: int) -> str:
        start = start_of(self.campaign.spec, cell, trial)
        try:
            plan = self._runs.plan_of(self.campaign, cell, trial, self._clean[start])
        except FlipperError as error:
            error.args = (f"cell {cell.number} ({cell.label}): {error}", *error.args[1:])
            raise
        return "" if start in self._inexact else self._runs.plan_key(self.campaign, start, cell, plan)

    def _submit(self, waiting: _Waiting, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        waiting.call = (work, self.campaign, *arguments)
        return self._hand_on(waiting)

    def _hand_on(self, waiting: _Waiting) -> Future[Any]:
        submit = getattr(self.executor, "submit_ranks", None)
        if submit is not None:
            slots = getattr(self.executor, "slots", 1)
            ranks = 1 if self.campaign.spec.commands else Parallel.parse(waiting.start.parallel).ranks
            future: Future[Any] = submit(min(ranks, slots), in_scratch, *waiting.call)
        else:
            future = self.executor.submit(in_scratch, *waiting.call)
        self._at_work[future] = waiting
        return future

    def _each(self, futures: Iterable[Future[Any] | None]) -> None:
        """Hand on the runs as there is room for them, and store each result; on an error hand on no more."""
        self._at_work: dict[Future[Any], _Waiting] = {}
        self._suspects: list[_Waiting] = []
        try:
            self._follow(futures)
            while self._suspects:
                waiting = self._suspects.pop(0)
                waiting.alone = True
                self._follow([self._hand_on(waiting)])
        except BrokenExecutor as error:
            self._let_finish()
            raise TrainingError(f"the executor broke: {error}; what had finished is kept, run again") from error
        except BaseException:
            self._let_finish()
            raise

    def _follow(self, futures: Iterable[Future[Any] | None]) -> None:
        source = iter(futures)
        more = True
        while more or self._at_work:
            while more and len(self._at_work) < self._room():
                more = next(source, self) is not self
            done, _ = wait(self._at_work, return_when=FIRST_COMPLETED)
            for future in done:
                self._take(future)

    def _room(self) -> int:
        return AHEAD * (self.at_once() if callable(self.at_once) else self.at_once)

    def _let_finish(self) -> None:
        """Store what is done when an error ends the campaign, and call off the rest.

        A failure is not stored: what ends the campaign, a batch system perhaps, may have ended that run as well.
        """
        for future in list(self._at_work):
            if not future.done():
                future.cancel()
            elif not future.cancelled() and future.exception() is None and not _failed(future.result()[-1]):
                self._take(future)

    def _take(self, future: Future[Any]) -> None:
        waiting = self._at_work.pop(future)
        try:
            records = future.result()
        except CancelledError as error:
            raise TrainingError(
                f"{waiting.label}: the executor called it off; what had finished is kept, run again to go on"
            ) from error
        except Exception as error:
            lost = self.lost(error)
            if not waiting.alone and (lost or isinstance(error, EndedError)):
                self._suspects.append(waiting)
                return
            if not lost:
                raise self._told(waiting, error) from error
            if waiting.kind != "trial":
                raise TrainingError(f"{waiting.label}: its worker died, each time: {error}") from error
            records = (self._crashed(waiting, error),)
        self._learn(waiting.start, records)
        self._keep_result(*records)
        for cell, trial in waiting.same:
            self._keep_result(_reused(records[-1], cell, trial))

    def _learn(self, start: Start, records: Iterable[RunRecord]) -> None:
        """What a golden run and its control say about the runs that start where they did."""
        found = {record.kind: record for record in records}
        if (golden := found.get("golden")) is None:
            return
        self._goldens[golden_key(golden)] = golden
        self._golden_of.setdefault(start, golden)
        self._clean.setdefault(start, self._runs.clean_of(self.campaign, start, golden))
        if (control := found.get("control")) is None or start in self._compared:
            return
        self._compared.add(start)
        if self._runs.parts(golden, control) is not None:
            self._inexact.add(start)
        note = self._runs.note_on(self.campaign.spec, golden, control)
        if note is not None and start.parallel not in self._noted:
            self._noted.add(start.parallel)
            self.progress.notes.append(note)

    def _keep_result(self, *records: RunRecord) -> None:
        self.store.add(*records)
        record = records[-1]
        self.progress.done += 1
        if record.kind == "trial":
            self._count(record)
            self.progress.reused += record.reused is not None
            self.progress.ended_early += record.ended != COMPLETED and record.error is None
        self._on_progress(self.progress)

    def _count(self, record: RunRecord) -> None:
        """Note a trial's outcome."""
        judgement = self.judged(record)
        self.progress.outcomes[judgement.outcome] += 1
        self._harmful.setdefault(record.cell, {})[record.trial] = judgement.group != "benign"

    def _crashed(self, waiting: _Waiting, error: Exception) -> RunRecord:
        assert waiting.cell is not None
        golden = self._golden_of[waiting.start]
        return RunRecord(
            "trial", golden.parallel, golden.training_seed, checkpoint=golden.checkpoint, settings=golden.settings,
            cell=waiting.cell.number, trial=waiting.trial, ended=CRASH, error=f"its worker died: {error}",
            fingerprint=golden.fingerprint, plan=waiting.plan, reach=waiting.cell.reach,
        )  # fmt: skip

    def _told(self, waiting: _Waiting, error: Exception) -> Exception:
        """The error with the run that it belongs to."""
        if not isinstance(error, FlipperError):
            return error
        what = "" if waiting.cell is None else f"{waiting.label}: "
        error.args = (f"{what}{error}", *error.args[1:])
        return error

    def _begin(self, stage: str, total: int, done: int = 0) -> None:
        self.progress.stage, self.progress.total, self.progress.done = stage, total, done
        self._on_progress(self.progress)


def _shortened(record: RunRecord) -> bool:
    """Whether a trial has a result that it didn't run to the end for."""
    return (record.ended != COMPLETED and record.error is None) or record.reused is not None


def _failed(record: RunRecord) -> bool:
    return record.ended in (CRASH, HANG, REFUSED)


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
