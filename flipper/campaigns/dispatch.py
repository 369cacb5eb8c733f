"""Dispatch: hands runs to an executor as there is room for them, and gives back what each comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any, Final

from flipper.campaigns.cells import Cell, Start
from flipper.campaigns.record import RunRecord
from flipper.campaigns.scratch import in_scratch
from flipper.errors import EndedError, FlipperError, TrainingError

AHEAD: Final = 2
"""Runs that wait at the executor for each one that it can make at once."""

SECONDS_BETWEEN_LOOKS: Final = 0.5
"""A signal that arrives while a thread lets go of Python's lock, about to wait, is only seen when it has waited."""

Records = tuple[RunRecord, ...]


@dataclass
class Run:
    """A run to be made. call: the function that makes it, and its arguments; ranks: how many it has.

    kind, cell, trial, start: what it is. plan: the key of its faults; same: trials that wait for its result.
    """

    kind: str
    cell: Cell | None
    trial: int
    start: Start
    call: tuple[Any, ...]
    ranks: int
    plan: str = ""
    same: list[tuple[Cell, int]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """For error messages."""
        if self.cell is None:
            return f"{self.kind} run of {self.start.label}"
        return f"cell {self.cell.number}, trial {self.trial}"


class Dispatch:
    """Makes runs on an executor.

    executor: any concurrent.futures.Executor; one that has `submit_ranks` is told how many ranks a run has. at_once:
    runs that it can make at once, or what tells that when asked. lost: whether an error of the executor means that a
    run's worker died. Such a run is made once more with nothing beside it: only one that kills its worker then is to
    blame. take: gets each run with its records. crashed: the record of a trial that kills its worker.
    """

    def __init__(
        self,
        executor: Executor,
        at_once: int | Callable[[], int],
        lost: Callable[[BaseException], bool],
        take: Callable[[Run, Records], None],
        crashed: Callable[[Run, Exception], RunRecord],
    ) -> None:
        self._executor, self._at_once, self._lost = executor, at_once, lost
        self._store, self._crashed = take, crashed
        self._at_work: dict[Future[Any], Run] = {}
        self._suspects: list[Run] = []

    def each(self, runs: Iterable[Run | None]) -> None:
        """Make the runs, in order as there is room; None stands for one that needs none. On an error make no more."""
        try:
            self._follow(runs)
            while self._suspects:
                self._follow([self._suspects.pop(0)], alone=True)
        except BrokenExecutor as error:
            self._let_finish()
            raise TrainingError(
                f"the executor broke: {error}; what had finished is kept, run again to go on"
            ) from error
        except BaseException:
            self._let_finish()
            raise

    def _follow(self, runs: Iterable[Run | None], alone: bool = False) -> None:
        source = iter(runs)
        more = True
        while more or self._at_work:
            while more and len(self._at_work) < self._room():
                run = next(source, self)
                if isinstance(run, Run):
                    self._at_work[self._submit(run)] = run
                more = run is not self
            done, _ = wait(self._at_work, SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
            for future in [future for future in self._at_work if future in done]:
                self._take(future, alone)

    def _room(self) -> int:
        return AHEAD * (self._at_once() if callable(self._at_once) else self._at_once)

    def _submit(self, run: Run) -> Future[Any]:
        submit = getattr(self._executor, "submit_ranks", None)
        if submit is None:
            return self._executor.submit(in_scratch, *run.call)
        slots = getattr(self._executor, "slots", 1)
        future: Future[Any] = submit(min(run.ranks, slots), in_scratch, *run.call)
        return future

    def _take(self, future: Future[Any], alone: bool) -> None:
        run = self._at_work.pop(future)
        try:
            records = future.result()
        except CancelledError as error:
            raise TrainingError(
                f"{run.label}: the executor called it off; what had finished is kept, run again to go on"
            ) from error
        except Exception as error:
            lost = self._lost(error)
            if not alone and (lost or isinstance(error, EndedError)):
                self._suspects.append(run)
                return
            if not lost:
                raise _told(run, error) from error
            if run.kind != "trial":
                raise TrainingError(f"{run.label}: its worker died, each time: {error}") from error
            records = (self._crashed(run, error),)
        self._store(run, records)

    def _let_finish(self) -> None:
        """Store what is done when an error ends the campaign, and call off the rest.

        A failure is not stored: what ends the campaign, a batch system perhaps, may have ended that run as well.
        """
        for future, run in self._at_work.items():
            if not future.done():
                future.cancel()
            elif not future.cancelled() and future.exception() is None and not future.result()[-1].failed:
                self._store(run, future.result())
        self._at_work.clear()
        self._suspects.clear()


def _told(run: Run, error: Exception) -> Exception:
    """The error with the run that it belongs to."""
    if isinstance(error, FlipperError) and run.cell is not None:
        error.args = (f"{run.label}: {error}", *error.args[1:])
    return error
