"""The coordinator: which runs a campaign still lacks, in order, and what becomes of their results."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from flipper.campaigns.cells import Cell, Start, null_starts, pairs_in_turn, start_of, starts
from flipper.campaigns.dispatch import Dispatch, Run
from flipper.campaigns.folder import Campaign
from flipper.campaigns.outcomes import Band, Judgement, band_of, bands, golden_key, judge
from flipper.campaigns.record import CRASH, NONFINITE, RunRecord
from flipper.campaigns.runner import run_golden, run_null, run_trial, runner_of
from flipper.campaigns.store import Store
from flipper.errors import FlipperError, TrainingError
from flipper.training.layouts import Parallel


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


class Coordinator:
    """Runs a campaign. One process, one writer.

    executor, at_once, lost: as for Dispatch. shard: (number from 1, how many): only every how-many-th trial and null
    trial. keep: altered files stay. audit: the part of the shortened trials that is run in full as well. on_results: is
    called before results are stored, and when there are no more to come.
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
        on_results: Callable[[], None] = lambda: None,
    ) -> None:
        self.campaign, self.store = campaign, store
        self.shard, self.keep, self.audit = shard, keep, audit
        self.progress = Progress()
        self._dispatch = Dispatch(executor, at_once, lost, self._take, self._crashed)
        self._on_progress, self._on_results = on_progress, on_results
        self._goldens: dict[tuple[Any, ...], RunRecord] = {}
        self._bands: dict[str, Band] = {}
        self._clean: dict[Start, Path] = {}
        self._golden_of: dict[Start, RunRecord] = {}
        self._compared: set[Start] = set()
        self._inexact: set[Start] = set()
        self._noted: set[str] = set()
        self._runs = runner_of(campaign.spec)
        self._harmful: dict[int, dict[int, bool]] = {}  # by cell and trial
        self._began = 0.0

    def run(self) -> Progress:
        """Run all that is not there yet; raises the first error, after storing what had finished."""
        self._began = time.monotonic() - float(self.store.facts().get("seconds", 0.0))
        self._goldens = {golden_key(golden): golden for golden in self.store.runs("golden")}
        try:
            self._controls()
            self._nulls()
            self._trials()
            self._on_results()
            self._audits()
        finally:
            self.store.set_fact("seconds", self._seconds())
        return self.progress

    def judged(self, record: RunRecord) -> Judgement:
        """What a trial comes to, by the thresholds as they stand."""
        spec = self.campaign.spec
        return judge(record, self._goldens[golden_key(record)], band_of(spec, self._bands, record.parallel), spec)

    def _controls(self) -> None:
        wanted = self._starts()
        self._begin("golden", len(wanted))
        self._dispatch.each(self._run("golden", start, run_golden, start) for start in wanted)
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
        return [
            (of_layout[number % len(of_layout)], number)
            for number in range(spec.null_trials if spec.tolerance is None else 0)
            if self._in_shard(number)
            for of_layout in null_starts(spec, self.campaign.cells)
        ]

    def _nulls(self) -> None:
        spec = self.campaign.spec
        if spec.tolerance is None:
            numbered = self._null_trials()
            there = {(r.parallel, r.checkpoint, r.settings, r.trial) for r in self.store.runs("null")}
            todo = [(s, n) for s, n in numbered if (s.parallel, s.checkpoint, s.setting, n) not in there]
            self._begin("null", len(numbered), len(numbered) - len(todo))
            self._dispatch.each(self._run("null", s, run_null, s, n, trial=n) for s, n in todo)
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
        at_work: dict[str, Run] = {}
        self._dispatch.each(self._trial(cell, trial, at_work) for cell, trial in todo)

    def _trial(self, cell: Cell, trial: int, at_work: dict[str, Run]) -> Run | None:
        """A trial to be run; None where one of the same plan has a result, which is taken, or is at work."""
        key = self._plan(cell, trial)
        if (same := self.store.of_plan(key)) is not None:
            self._keep_result(_reused(same, cell, trial))
            return None
        if key in at_work:
            at_work[key].same.append((cell, trial))
            return None
        start = start_of(self.campaign.spec, cell, trial)
        run = self._run("trial", start, run_trial, cell, trial, False, self.keep, cell=cell, trial=trial)
        if key:
            run.plan = key
            at_work[key] = run
        return run

    def _audits(self) -> None:
        """Run a sample of the shortened trials in full; all must come to the same."""
        short = [r for r in self.store.runs("trial") if _shortened(r)]
        there = {(r.cell, r.trial) for r in self.store.runs("audit")}
        sample = [r for r in short if _share(r) < self.audit]
        todo = [r for r in sample if (r.cell, r.trial) not in there]
        if sample:
            self._begin("audit", len(sample), len(sample) - len(todo))
        self._dispatch.each(self._audit(self.campaign.cell(r.cell), r.trial) for r in todo)
        found = {(r.cell, r.trial): r for r in self.store.runs("audit")}
        for record in short:
            full = found.get((record.cell, record.trial))
            if full is not None and (problem := _disagree(record, full)) is not None:
                raise TrainingError(f"audit: cell {record.cell}, trial {record.trial}, {problem}; report this")

    def _audit(self, cell: Cell, trial: int) -> Run:
        start = start_of(self.campaign.spec, cell, trial)
        return self._run("audit", start, run_trial, cell, trial, True, cell=cell, trial=trial)

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

    def _run(
        self,
        kind: str,
        start: Start,
        work: Callable[..., Any],
        *arguments: Any,
        cell: Cell | None = None,
        trial: int = 0,
    ) -> Run:
        ranks = 1 if self.campaign.spec.commands else Parallel.parse(start.parallel).ranks
        return Run(kind, cell, trial, start, (work, self.campaign, *arguments), ranks)

    def _take(self, run: Run, records: Sequence[RunRecord]) -> None:
        """Store what a run came to, for the trials that waited for it too."""
        self._learn(run.start, records)
        self._keep_result(*records)
        for cell, trial in run.same:
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
        record = records[-1]
        if record.kind not in ("golden", "control"):
            self._on_results()
        self.store.join(records, {"seconds": self._seconds()})  # a run that is killed won't say
        self.progress.done += 1
        if record.kind == "trial":
            self._count(record)
            self.progress.reused += record.reused is not None
            self.progress.ended_early += record.ended_early
        self._on_progress(self.progress)

    def _seconds(self) -> float:
        """How long the campaign has run, all calls together."""
        return time.monotonic() - self._began

    def _count(self, record: RunRecord) -> None:
        """Note a trial's outcome."""
        judgement = self.judged(record)
        self.progress.outcomes[judgement.outcome] += 1
        self._harmful.setdefault(record.cell, {})[record.trial] = judgement.group != "benign"

    def _crashed(self, run: Run, error: Exception) -> RunRecord:
        """The record of a trial that kills its worker."""
        assert run.cell is not None
        golden = self._golden_of[run.start]
        return RunRecord(
            "trial", golden.parallel, golden.training_seed, checkpoint=golden.checkpoint, settings=golden.settings,
            cell=run.cell.number, trial=run.trial, ended=CRASH, error=f"its worker died: {error}",
            fingerprint=golden.fingerprint, plan=run.plan, reach=run.cell.reach,
        )  # fmt: skip

    def _begin(self, stage: str, total: int, done: int = 0) -> None:
        self.progress.stage, self.progress.total, self.progress.done = stage, total, done
        self._on_progress(self.progress)


def _shortened(record: RunRecord) -> bool:
    """Whether a trial has a result that it didn't run to the end for."""
    return record.ended_early or record.reused is not None


def _reused(record: RunRecord, cell: Cell, trial: int) -> RunRecord:
    """A trial's record with the result of another that has the same plan."""
    return replace(record, cell=cell.number, trial=trial, reused=(record.cell, record.trial), seconds=0.0)


def _share(record: RunRecord) -> float:
    """A number in [0, 1) that the trial has for ever, so that the same are audited each time."""
    digest = hashlib.sha256(f"audit\0{record.cell}\0{record.trial}".encode()).digest()
    return int.from_bytes(digest[:6], "little") / (1 << 48)


def _disagree(short: RunRecord, full: RunRecord) -> str | None:
    """How a shortened trial differs from the same in full; None where they agree."""
    if short.ended == NONFINITE:
        finite = full.loss is not None and math.isfinite(full.loss)
        return "stopped as non-finite, has a finite loss in full" if finite else None
    if (short.state_digest, short.resume_digest) != (full.state_digest, full.resume_digest):
        return f"was taken as {short.ended}, and ends in another state in full"
    return None
