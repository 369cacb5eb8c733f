"""What every rank of a run whose ranks may die does: train, and recover whenever contact is lost."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from flipper.errors import TrainingError, UsageError
from flipper.failstop.buckets import LostContact, contact
from flipper.failstop.kills import Kill
from flipper.failstop.messages import MET, Lost, Plan
from flipper.failstop.overlapped import Overlapped
from flipper.failstop.peers import GlooRing, PeerCopies, Ring, take_up
from flipper.failstop.spec import FailstopSpec
from flipper.failstop.survivor import GlooSurvivor, Survivor
from flipper.training import loop
from flipper.training.allreduce import Allreduce
from flipper.training.layouts import Parallel
from flipper.training.parallel import device_of
from flipper.training.parallel.whole import Whole
from flipper.training.ranks import Place
from flipper.training.recipes.parts import model_of
from flipper.training.recipes.recipe import Recipe
from flipper.training.ties import ties_of


def train_rank(job: FailstopSpec, place: Place, send: Callable[[Any], None]) -> None:
    """One rank's part of the run. send: events and messages, to the launching process."""
    began = time.monotonic()
    ring = functools.partial(GlooRing, place)
    (run_through if job.overlapped else _run_until_death)(job, _survivor(job, place, send), send, began, ring)


def _survivor(job: FailstopSpec, place: Place, send: Callable[[Any], None]) -> GlooSurvivor:
    mesh = job.train.summing.mesh
    if mesh is not None:
        from flipper.failstop.routed_survivor import RoutedSurvivor  # plans meshes

        return RoutedSurvivor(place, send, job.kills, mesh)
    return (GlooLeaver if job.peer_copies and job.overlapped else GlooSurvivor)(place, send, job.kills)


class GlooLeaver(GlooSurvivor):
    """A rank that doesn't go on when another is lost: it hands its copies over, and all start anew."""

    def recover(self, report: Callable[[int], Lost]) -> Plan:
        """Raises TrainingError."""
        raise TrainingError("contact was lost")


def run_through(
    job: FailstopSpec, survivor: Survivor, send: Callable[[Any], None], began: float, ring: Callable[[], Ring]
) -> None:
    """The run of one rank, from its first step to its last. began: CLOCK_MONOTONIC, in seconds."""
    run = loop.begin(job.train, survivor.place, send, functools.partial(_set_up, job, survivor))
    with _keeping_copies(job, run, ring, send) as keep:
        layout = run.layout
        assert isinstance(layout, Overlapped)
        layout.completed = run.progress.step
        layout.on_first = run.tell_step
        _check_kills(job.kills, run.progress.step + 1, run.total)
        run.overwrites = job.restarted
        run.announce()
        run.overwrites = True
        _train_through(run, layout, keep)
        _together(layout, "end", lambda: run.end(began))


def _train_through(run: loop.Run, layout: Overlapped, keep: Callable[[], None]) -> None:
    if run.progress.step == run.total:
        _together(layout, "look", run.look_and_save)
    while run.progress.step < run.total and run.stopped is None:
        keep()
        run.train_step()
        if run.notices:
            _together(layout, "notice", run.notice)
        else:
            run.notice()
        if run.looks:
            _together(layout, "look", run.look_and_save)


def _run_until_death(
    job: FailstopSpec, survivor: Survivor, send: Callable[[Any], None], began: float, ring: Callable[[], Ring]
) -> None:
    """The run of one rank that holds a part of the model, without which the others can't go on."""
    run = loop.begin(job.train, survivor.place, send)
    with _keeping_copies(job, run, ring, send) as keep:
        run.overwrites = job.restarted
        _check_kills(job.kills, run.progress.step + 1, run.total)

        def before_step(number: int) -> None:
            keep()
            survivor.meet_and_die(number)

        loop.to_the_end(run, began, before_step)


@contextmanager
def _keeping_copies(
    job: FailstopSpec, run: loop.Run, ring: Callable[[], Ring], send: Callable[[Any], None]
) -> Iterator[Callable[[], None]]:
    """What is to be called before each step, to have copies with peers; hands them over when the run breaks off."""
    if not job.peer_copies:
        yield lambda: None
        return
    rank = run.layout.grid.rank
    if job.copies:
        take_up(run, job.copies[rank])
    copies = PeerCopies(run, ring(), job.peer_copies, job.peer_every)
    try:
        yield copies.keep
    except BaseException:
        copies.hand_over(job.boxes[rank], send)
        raise


def _check_kills(kills: Iterable[Kill], first: int, last: int) -> None:
    has = f"the steps {first} to {last}" if first <= last else "none"
    for kill in kills:
        if kill.step is not None and not first <= kill.step <= last:
            raise UsageError(f"--kill {kill}: there is no such step; this run has {has}")


def _set_up(
    job: FailstopSpec,
    survivor: Survivor,
    parallel: Parallel,
    recipe: Recipe,
    place: Place,
    sample: Tensor,
    allreduce: Allreduce,
) -> Overlapped:
    """As parallel.set_up."""
    grid = survivor.grid(parallel, device_of(place))
    model = model_of(recipe)
    engine = Whole(recipe, model.to(grid.device), lambda module: module)
    return Overlapped(grid, recipe, engine, ties_of(model), survivor, job)


def _together(layout: Overlapped, phase: str, work: Callable[[], None]) -> None:
    """Do what is done between steps, again if a rank is lost meanwhile; nobody goes on before all have done it."""
    while True:
        layout.phase = phase
        try:
            with contact():
                work()
            layout.phase = MET[phase]
            with contact():
                layout.survivor.meet()
            return
        except LostContact as error:
            said = str(error)
        action = layout.recover(said).actions[layout.grid.rank]
        if action == "on":
            return
        if action != "again":
            raise TrainingError(f"told to {action!r} after a step")
