"""Deaths at the moments that a kill can't name, brought about by a recipe that reaches into its own rank."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import Death, trained
from real_runs import same, weights
from torch import nn

from flipper.errors import TrainingError
from flipper.failstop.buckets import LostContact, Reducer
from flipper.failstop.kills import Kill
from flipper.failstop.run import FailstopResult, train_through
from flipper.failstop.spec import FailstopSpec
from flipper.training.layouts import Parallel
from flipper.training.run import train
from flipper.training.spec import Event, TrainSpec

RECIPE = """
import os, signal, threading, time
from flipper.failstop import survivor
from flipper.training import loop, recipes, saving

mlp = recipes.get("digits-mlp")

def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""

DIES_JOINING = """
make_group = survivor.make_group

def joining(place, store):
    if place.world == 3 and place.rank == 0:
        threading.Thread(target=die).start()
    make_group(place, store)

survivor.make_group = joining
"""
JOINS_AT_THE_SECOND_ATTEMPT = """
make_group, attempts = survivor.make_group, []

def joining(place, store):
    attempts.append(place)
    if place.rank == 1 and len(attempts) == 1:
        raise RuntimeError("too slow")
    make_group(place, store)

survivor.make_group = joining
"""
DIES_WHEN_ALL_BUT_ONE_HAVE_SAVED = """
look = loop.Run.look_and_save

def looking(self):
    look(self)
    if self.progress.step == 4 and self.layout.grid.world == 4:
        if self.layout.grid.rank == 1:
            self.layout.grid.everyone("nobody else comes here")
        if self.layout.grid.rank == 3:
            time.sleep(0.5)
            die()

loop.Run.look_and_save = looking
"""
DIES_BEFORE_IT_TELLS_OF_A_STEP = """
emit = loop.Run.emit

def emitting(self, event, **values):
    if event == "step" and values["step"] == 5 and self.layout.grid.rank == 0 and self.layout.grid.world == 4:
        die()
    emit(self, event, **values)

loop.Run.emit = emitting
"""
DIES_BEFORE_IT_TELLS_OF_A_CHECKPOINT = """
save = saving.save

def saving_once(state, path, *rest):
    there = path.with_name("once").exists()
    save(state, path, *rest)
    path.with_name("once").touch()
    if not there:
        die()

loop.saving.save = saving_once
"""
STOPS_BEFORE_THE_FIRST_STEP_OF_A_RESTART = """
begin = loop.Run.announce

def announcing(self):
    stopped = self.spec.save.with_name("stopped")
    if self.layout.grid.rank == 1 and self.progress.step and not stopped.exists():
        stopped.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    self.layout.grid.everyone("here")
    begin(self)

loop.Run.announce = announcing
"""

DIES_BEFORE_THE_RUN_HAS_BEGUN = """
from pathlib import Path
import torch.distributed as dist

dead = Path(__file__).with_name("dead")
if dist.is_initialized() and dist.get_rank() == 1 and not dead.exists():
    dead.touch()
    die()
"""


def run(
    patch: str, kills: tuple[str, ...], recovery: str, folder: Path, events: list[Event], ranks: int = 4,
    timeout: float = 30.0,
) -> FailstopResult:  # fmt: skip
    recipe = folder / "reaching.py"
    recipe.write_text(RECIPE + patch)
    spec = TrainSpec(
        f"{recipe}:mlp", Parallel("ddp", ranks), steps=12, seed=1, save=folder / "saved", save_every=4, timeout=timeout
    )
    return train_through(FailstopSpec(spec, tuple(map(Kill.parse, kills)), recovery), events.append)


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
def test_a_death_while_the_survivors_make_their_group_is_one_more_death(recovery: str, tmp_path: Path) -> None:
    """Rank 0 dies in gloo's own connecting, which holds the others up for five attempts."""
    result = run(DIES_JOINING, ("rank:1@step:6:bucket:1",), recovery, tmp_path, [])
    assert [lost["rank"] for lost in result.lost] == [1, 0]
    deaths = (Death(1, 6, 1), Death(0, 6, 1))
    assert same(weights(tmp_path / "saved", 12), trained(4, 12, deaths, recovery))


def test_a_group_that_does_not_come_about_is_made_anew(tmp_path: Path) -> None:
    events: list[Event] = []
    result = run(JOINS_AT_THE_SECOND_ATTEMPT, ("rank:1@step:6:bucket:1",), "lossy", tmp_path, events)
    assert [lost["rank"] for lost in result.lost] == [1]
    assert [event["world_size"] for event in events if event["event"] == "recovered"] == [3]
    assert same(weights(tmp_path / "saved", 12), trained(4, 12, (Death(1, 6, 1),), "lossy"))


def test_a_checkpoint_that_was_written_is_written_anew_by_those_that_are_left(tmp_path: Path) -> None:
    events: list[Event] = []
    result = run(DIES_WHEN_ALL_BUT_ONE_HAVE_SAVED, (), "rollback", tmp_path, events)
    assert result.world_size == 3
    assert [event["step"] for event in events if event["event"] == "saved"] == [4, 4, 8, 12]
    assert same(weights(tmp_path / "saved", 12), trained(4, 12, (Death(3, 5),), "rollback"))


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
def test_each_step_is_told_once_though_the_first_rank_dies_before_it_tells(recovery: str, tmp_path: Path) -> None:
    events: list[Event] = []
    result = run(DIES_BEFORE_IT_TELLS_OF_A_STEP, (), recovery, tmp_path, events)
    assert [lost["rank"] for lost in result.lost] == [0]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 13))
    assert result.world_size == 3


def test_a_run_restarts_though_nobody_was_told_of_its_last_checkpoint(tmp_path: Path) -> None:
    whole = train(TrainSpec("digits-mlp", Parallel("ddp", 2), steps=12, seed=1))
    events: list[Event] = []
    result = run(DIES_BEFORE_IT_TELLS_OF_A_CHECKPOINT, (), "restart", tmp_path, events, ranks=2)
    assert [lost["rank"] for lost in result.lost] == [0]
    assert [event["step"] for event in events if event["event"] == "saved"] == [4, 8, 12]
    assert result.state_digest == whole.state_digest


def test_a_rank_that_hangs_before_the_others_begin_is_one_more_death(tmp_path: Path) -> None:
    whole = train(TrainSpec("digits-mlp", Parallel("ddp", 2), steps=12, seed=1))
    kills, events = ("rank:0@step:6:bucket:1",), list[Event]()
    result = run(STOPS_BEFORE_THE_FIRST_STEP_OF_A_RESTART, kills, "restart", tmp_path, events, ranks=2, timeout=3.0)
    assert [lost["rank"] for lost in result.lost] == [0, 1]
    assert result.state_digest == whole.state_digest


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
def test_a_death_before_the_run_has_begun_is_what_ends_it(recovery: str, tmp_path: Path) -> None:
    """And not what the others, who have no state to go on from yet, make of it."""
    with pytest.raises(TrainingError, match=r"^rank 1 of 3 died \(killed by SIGKILL\)"):
        run(DIES_BEFORE_THE_RUN_HAS_BEGUN, (), recovery, tmp_path, [], ranks=3)


def test_a_death_before_the_run_has_begun_is_restarted_from(tmp_path: Path) -> None:
    events: list[Event] = []
    result = run(DIES_BEFORE_THE_RUN_HAS_BEGUN, (), "restart", tmp_path, events, ranks=2)
    assert [event["world_size"] for event in events if event["event"] == "recovered"] == [2]
    assert (result.world_size, result.steps) == (2, 12)


KILLS_ITSELF = """
train = loop.Run.train_step

def training(self):
    train(self)
    dead = self.spec.save.with_name("dead")
    if self.layout.grid.rank == 1 and self.progress.step == 5 and not dead.exists():
        dead.touch()
        die()

loop.Run.train_step = training
"""


def test_a_kill_is_still_to_come_for_a_rank_that_died_of_something_else(tmp_path: Path) -> None:
    result = run(KILLS_ITSELF, ("rank:1@step:9",), "restart", tmp_path, [], ranks=2)
    assert [lost["rank"] for lost in result.lost] == [1, 1]
    assert result.lost[0]["step"] in (5, 6)  # rank 0 may not have told of the step that is done
    assert result.lost[1]["step"] == 9
    assert result.state_digest == train(TrainSpec("digits-mlp", Parallel("ddp", 2), steps=12, seed=1)).state_digest


class Work:
    """What holds a group's connections open as long as it lives."""


class Alone:
    """A survivor whose next sum fails, with a work under way."""

    def __init__(self) -> None:
        self.work: weakref.ref[Work] | None = None

    def begin_sum(self, flat: torch.Tensor) -> torch.Tensor:
        work = Work()
        self.work = weakref.ref(work)
        raise RuntimeError("connection closed by peer")


def test_of_a_broken_sum_nothing_is_held_on_to() -> None:
    """Else the group's connections stay open, and who waits for this rank waits until its timeout."""
    module = nn.Linear(2, 1)
    alone: Any = Alone()
    reducer = Reducer(module, torch.optim.SGD(module.parameters(), 0.1), alone, lambda bucket: None)
    gc.disable()
    try:
        reducer.begin()
        module(torch.ones(1, 2)).sum().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(LostContact, match="connection closed"):
            reducer.finish()
        assert alone.work is not None
        assert alone.work() is None
    finally:
        gc.enable()
