"""What every rank of a run whose ranks may die does: train, and recover whenever contact is lost."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from flipper.errors import TrainingError, UsageError
from flipper.failstop.buckets import LostContact, contact
from flipper.failstop.kills import Kill
from flipper.failstop.messages import MET
from flipper.failstop.overlapped import Overlapped
from flipper.failstop.routed_survivor import RoutedSurvivor
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
    mesh = job.train.summing.mesh
    survivor = GlooSurvivor(place, send, job.kills) if mesh is None else RoutedSurvivor(place, send, job.kills, mesh)
    if job.overlapped:
        run_through(job, survivor, send, began)
    else:
        _run_until_death(job, survivor, send, began)


def run_through(job: FailstopSpec, survivor: Survivor, send: Callable[[Any], None], began: float) -> None:
    """The run of one rank, from its first step to its last. began: CLOCK_MONOTONIC, in seconds."""
    run = loop.begin(job.train, survivor.place, send, functools.partial(_set_up, job, survivor))
    layout = run.layout
    assert isinstance(layout, Overlapped)
    layout.completed = run.progress.step
    _check_kills(job.kills, run.progress.step + 1, run.total)
    run.overwrites = job.restarted
    run.announce()
    run.overwrites = True
    if run.progress.step == run.total:
        _together(layout, "look", run.look_and_save)
    while run.progress.step < run.total and run.stopped is None:
        run.train_step()
        if run.notices:
            _together(layout, "notice", run.notice)
        else:
            run.notice()
        if run.looks:
            _together(layout, "look", run.look_and_save)
    _together(layout, "end", lambda: run.end(began))


def _run_until_death(job: FailstopSpec, survivor: Survivor, send: Callable[[Any], None], began: float) -> None:
    """The run of one rank that holds a part of the model, without which the others can't go on."""
    run = loop.begin(job.train, survivor.place, send)
    run.overwrites = job.restarted
    _check_kills(job.kills, run.progress.step + 1, run.total)
    loop.to_the_end(run, began, survivor.meet_and_die)


def _check_kills(kills: Iterable[Kill], first: int, last: int) -> None:
    for kill in kills:
        if kill.step is not None and not first <= kill.step <= last:
            raise UsageError(f"--kill {kill}: there is no such step; this run has the steps {first} to {last}")


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
