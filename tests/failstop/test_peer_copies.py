"""Peer copies: runs that lose ranks, and parts of the model with them, and go on from what others hold in memory."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from by_hand import trained
from real_runs import kill_launcher_after_a_death, same, weights

from flipper.errors import TrainingError, UsageError
from flipper.failstop.kills import Kill
from flipper.failstop.run import FailstopResult, train_through
from flipper.failstop.salvage import all_gone, newest
from flipper.failstop.spec import Copy, FailstopSpec
from flipper.training.faults_file import read_faults
from flipper.training.layouts import Parallel
from flipper.training.run import train
from flipper.training.spec import Event, TrainSpec

LAYOUTS = (
    "ddp:2", "hooks:2", "fsdp:2", "fsdp:3", "tensor:2", "pipeline:2", "pipeline-1f1b:2", "ddp:2+pipeline:2",
    "fsdp:2+tensor:2",
)  # fmt: skip


def run(
    layout: str, kills: tuple[str, ...], copies: int = 1, *, recipe: str = "digits-cnn", steps: int = 8,
    every: int = 1, events: list[Event] | None = None, timeout: float = 30.0, **options: Any,
) -> FailstopResult:  # fmt: skip
    spec = TrainSpec(recipe, Parallel.parse(layout), steps=steps, seed=1, timeout=timeout, **options)
    job = FailstopSpec(spec, tuple(map(Kill.parse, kills)), "restart", peer_copies=copies, peer_every=every)
    return train_through(job, (events if events is not None else []).append)


def uninterrupted(layout: str, recipe: str = "digits-cnn", steps: int = 8, **options: Any) -> tuple[str, str]:
    result = train(TrainSpec(recipe, Parallel.parse(layout), steps=steps, seed=1, **options))
    return result.state_digest, result.resume_digest


def digests(result: FailstopResult) -> tuple[str, str]:
    return result.state_digest, result.resume_digest


def sources(events: list[Event]) -> list[tuple[str, int]]:
    return [(event["source"], event["step"]) for event in events if event["event"] == "recovered"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lost_part_comes_back_from_memory_and_the_run_ends_as_if_nothing_had_happened(layout: str) -> None:
    """The first rank, then the last; with BatchNorm, dropout, AdamW and a schedule, and without a checkpoint."""
    last = Parallel.parse(layout).ranks - 1
    recipe = "digits-mlp" if "tensor" in layout else "digits-cnn"
    events: list[Event] = []
    result = run(layout, ("rank:0@step:4", f"rank:{last}@step:7"), recipe=recipe, events=events)
    assert [(lost["rank"], lost["step"]) for lost in result.lost] == [(0, 4), (last, 7)]
    assert sources(events) == [("peers", 3), ("peers", 6)]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 9))
    assert digests(result) == uninterrupted(layout, recipe)
    assert (result.files, result.world_size) == ([], last + 1)


def test_a_death_inside_a_bucket_takes_back_what_was_applied(tmp_path: Path) -> None:
    events: list[Event] = []
    run("ddp:3", ("rank:1@step:6:bucket:2",), recipe="digits-mlp", events=events, save=tmp_path)
    assert sources(events) == [("peers", 5)]
    assert same(weights(tmp_path, 8), trained(3, 8))


def test_neighbours_that_die_together_need_two_copies() -> None:
    kills = ("rank:1@step:5", "rank:2@step:5")
    with pytest.raises(TrainingError) as told:
        run("fsdp:4", kills, 1)
    assert str(told.value) == (
        "ranks 1, 2 died, and every copy of the part of rank 1 of the run with them: --peer-copies 2 would have kept "
        "it, or a checkpoint (--save DIR --save-every N)"
    )
    assert digests(run("fsdp:4", kills, 2)) == uninterrupted("fsdp:4")


def test_a_rank_that_came_back_may_die_again() -> None:
    events: list[Event] = []
    result = run("pipeline:2", ("rank:1@step:3", "rank:1@step:6", "rank:1@step:7"), events=events)
    assert sources(events) == [("peers", 2), ("peers", 5), ("peers", 6)]
    assert digests(result) == uninterrupted("pipeline:2")


def test_two_that_are_no_neighbours_need_one_copy() -> None:
    events: list[Event] = []
    result = run("fsdp:4", ("rank:0@step:5", "rank:2@step:5"), 1, events=events)
    assert sources(events) == [("peers", 4)]
    assert digests(result) == uninterrupted("fsdp:4")


def test_where_no_copy_is_left_the_last_checkpoint_is_taken(tmp_path: Path) -> None:
    events: list[Event] = []
    kills = ("rank:0@step:6", "rank:1@step:6", "rank:2@step:8")
    result = run("fsdp:3", kills, events=events, save=tmp_path, save_every=4)
    assert sources(events) == [("checkpoint", 4), ("peers", 7)]
    assert digests(result) == uninterrupted("fsdp:3")


def test_what_the_run_was_resumed_from_is_a_checkpoint_too(tmp_path: Path) -> None:
    train(TrainSpec("digits-cnn", Parallel.parse("fsdp:3"), steps=3, seed=1, save=tmp_path))
    events: list[Event] = []
    result = run("fsdp:3", ("rank:0@step:6", "rank:1@step:6"), events=events, resume=tmp_path)
    assert sources(events) == [("checkpoint", 3)]
    assert digests(result) == uninterrupted("fsdp:3")


@pytest.mark.parametrize(("save_every", "source"), [(3, ("checkpoint", 6)), (4, ("peers", 5))])
def test_copies_may_be_made_seldom_and_the_newest_of_all_is_taken(
    save_every: int, source: tuple[str, int], tmp_path: Path
) -> None:
    events: list[Event] = []
    result = run("pipeline:2", ("rank:1@step:7",), every=5, events=events, save=tmp_path, save_every=save_every)
    assert sources(events) == [source]
    assert digests(result) == uninterrupted("pipeline:2")


@pytest.mark.parametrize(("layout", "kill"), [("pipeline:2", "rank:0@step:5"), ("ddp:3", "rank:1@step:5:bucket:1")])
def test_a_rank_that_hangs_is_killed_and_comes_back(layout: str, kill: str) -> None:
    events: list[Event] = []
    result = run(layout, (f"{kill},signal:STOP",), events=events, timeout=2.0)
    assert sources(events) == [("peers", 4)]
    assert digests(result) == uninterrupted(layout)


@pytest.mark.parametrize(("at", "save_every"), [(3, 0), (5, 0), (3, 4)])
def test_what_was_struck_stays_struck_and_what_was_not_is_struck_then(at: int, save_every: int, tmp_path: Path) -> None:
    """A fault before the copy that is gone on from, or after it; and one that a checkpoint holds."""
    table = tmp_path / "faults.toml"
    table.write_text('layer = ["fc1"]\nbits = "mantissa-msb"\nseed = 7\ncount = 3\n')
    struck = {"inject": read_faults(table), "at": at}
    kills = ("rank:1@step:6",) if not save_every else ("rank:1@step:6", "rank:0@step:6")
    saving = {"save": tmp_path / "saved", "save_every": save_every} if save_every else {}
    result = run("pipeline:2" if not save_every else "fsdp:3", kills, recipe="digits-mlp", **struck, **saving)
    whole = uninterrupted("pipeline:2" if not save_every else "fsdp:3", "digits-mlp", **struck)
    assert digests(result) == whole
    assert whole != uninterrupted("pipeline:2" if not save_every else "fsdp:3", "digits-mlp")


RECIPE = """
import os, signal, time
from pathlib import Path
import torch.distributed as dist
from flipper.failstop import peers
from flipper.training import loop, recipes

cnn = recipes.get("digits-cnn")
FOLDER = Path(__file__).parent

def die_once(name):
    try:
        (FOLDER / name).mkdir()
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""
DIES_WHILE_COPIES_ARE_PASSED = """
swap, calls = peers.GlooRing._swap, []

def swapping(self, mine, theirs, distance):
    calls.append(mine)
    if self._rank == 1 and len(calls) == 10:  # the copy itself, at the fifth moment
        die_once("swapping")
    swap(self, mine, theirs, distance)

peers.GlooRing._swap = swapping
"""
DIES_AGAIN_BEFORE_COPIES_ARE_MADE_ANEW = """
begin, take_up = loop.Run.train_step, peers.take_up

def stepping(self):
    if self.progress.step == 4 and self.layout.grid.rank == 1:
        die_once("stepping")
    begin(self)

def taking(run, copy):
    take_up(run, copy)
    if run.layout.grid.rank == 0:
        die_once("taking")

loop.Run.train_step = stepping
import flipper.failstop.loop
flipper.failstop.loop.take_up = taking
"""
DIES_BEFORE_THE_FIRST_STEP = """
announce = loop.Run.announce

def announcing(self):
    if self.layout.grid.rank == 1:
        die_once("announcing")
    announce(self)

loop.Run.announce = announcing
"""
FAILS = """
step = loop.Run.train_step

def stepping(self):
    if self.progress.step == 4 and self.layout.grid.rank == 1:
        raise MemoryError("no room for activations")
    step(self)

loop.Run.train_step = stepping
"""


@pytest.mark.parametrize("layout", ["pipeline:2", "fsdp:3"])
@pytest.mark.parametrize(
    ("patch", "found"),
    [
        (DIES_WHILE_COPIES_ARE_PASSED, [("peers", 3)]),
        (DIES_AGAIN_BEFORE_COPIES_ARE_MADE_ANEW, [("peers", 4)]),  # told once, when it is there
        (DIES_BEFORE_THE_FIRST_STEP, [("beginning", 0)]),
    ],
    ids=["while copies are passed", "before copies are made anew", "before the first step"],
)
def test_a_death_at_any_moment_is_survived(
    layout: str, patch: str, found: list[tuple[str, int]], tmp_path: Path
) -> None:
    (tmp_path / "dying.py").write_text(RECIPE + patch)
    events: list[Event] = []
    result = run(layout, (), recipe=f"{tmp_path / 'dying.py'}:cnn", events=events)
    assert sources(events) == found
    assert digests(result) == uninterrupted(layout)


def test_an_error_in_a_rank_is_no_death(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(RECIPE + FAILS)
    events: list[Event] = []
    with pytest.raises(TrainingError, match="no room for activations"):
        run("pipeline:2", (), recipe=f"{tmp_path / 'failing.py'}:cnn", events=events)
    assert sources(events) == []


ALWAYS_DIES = """
announce = loop.Run.announce

def announcing(self):
    if self.layout.grid.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    announce(self)

loop.Run.announce = announcing
"""


@pytest.mark.parametrize("saving", [False, True])
def test_a_run_that_never_makes_a_step_is_given_up(saving: bool, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(RECIPE + ALWAYS_DIES)
    spec = TrainSpec(f"{tmp_path / 'dying.py'}:cnn", Parallel.parse("pipeline:2"), steps=8, seed=1)
    if saving:
        spec = replace(spec, save=tmp_path / "saved", save_every=2)
    job = FailstopSpec(spec, recovery="restart", peer_copies=0 if saving else 1)
    events: list[Event] = []
    with pytest.raises(TrainingError, match="rank 1 died, before the first step like those before it: given up"):
        train_through(job, events.append)
    assert [event["event"] for event in events].count("rank-lost") == 5


def ranks_of_this_process() -> list[int]:
    """The processes forked by the server that this process has started."""
    from multiprocessing import forkserver

    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


@pytest.mark.parametrize("layout", ["ddp:2+pipeline:2", "fsdp:3"])
def test_ranks_killed_from_outside_at_any_moment_come_back(layout: str) -> None:
    draw = random.Random()
    events: list[Event] = []
    stepped = threading.Event()

    def hear(event: Event) -> None:
        events.append(event)
        if event["event"] == "step" and event["step"] > 3:
            stepped.set()

    def kill() -> None:
        for _ in range(3):
            stepped.wait(60)
            time.sleep(draw.random() * 0.5)
            if victims := ranks_of_this_process():
                os.kill(draw.choice(victims), signal.SIGKILL)
            stepped.clear()

    killer = threading.Thread(target=kill)
    killer.start()
    spec = TrainSpec("digits-cnn", Parallel.parse(layout), steps=50, seed=1, timeout=30.0, evaluate_every=3)
    result = train_through(FailstopSpec(spec, recovery="restart", peer_copies=1), hear)
    stepped.set()
    killer.join()
    assert result.lost
    assert digests(result) == uninterrupted(layout, steps=50)


def open_files(pid: int) -> list[str]:
    return [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]


def test_nothing_is_left_of_a_killed_launcher_nor_of_a_run_that_ended(tmp_path: Path) -> None:
    """Neither a process nor a file; what ranks hand over lies in memory that has no name."""
    shared = Path("/dev/shm")
    kill_launcher_after_a_death(
        tmp_path, "--parallel", "pipeline:2", "--recovery", "restart", "--peer-copies", "1", "--kill", "rank:1@step:50"
    )
    assert not list(shared.glob("flipper*"))
    assert not list(tmp_path.glob("flipper-peers*"))
    before = open_files(os.getpid())
    run("pipeline:2", ("rank:1@step:4",))
    assert [each for each in open_files(os.getpid()) if "flipper-peers" in each] == []
    assert [each for each in before if "flipper-peers" in each] == []


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["rank:2@step:5:bucket:1", "rank:0@step:5"])
def test_over_mpi_it_is_the_same(kill: str, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    events: list[Event] = []
    run("mpi:3", (kill,), recipe="digits-mlp", events=events, save=tmp_path)
    assert sources(events) == [("peers", 4)]
    assert same(weights(tmp_path, 8), trained(3, 8))


def copy(rank: int, step: int) -> Copy:
    return Copy(f"box-{rank}", 0, 1, step)


def test_the_newest_moment_of_which_all_is_left_is_taken() -> None:
    held = {(rank, step): copy(rank, step) for rank, step in ((0, 4), (1, 4), (2, 4), (0, 5), (2, 5))}
    assert newest(held, 3) == tuple(copy(rank, 4) for rank in range(3))
    assert newest({**held, (1, 5): copy(1, 5)}, 3) == tuple(copy(rank, 5) for rank in range(3))
    assert newest({(0, 4): copy(0, 4)}, 2) == ()


def test_what_is_said_of_lost_parts_is_so_for_every_set_of_deaths_and_number_of_copies() -> None:
    """Against who holds what, counted out."""
    ranks = 5
    for count in range(1, ranks):
        for size in range(1, ranks + 1):
            for dead in itertools.combinations(range(ranks), size):
                kept = [
                    {owner for holder in range(ranks) if holder not in dead
                     for owner in range(ranks) if (holder - owner) % ranks <= copies}
                    for copies in range(ranks)
                ]  # fmt: skip
                lost = sorted(set(range(ranks)) - kept[count])
                if not lost:
                    continue
                said = all_gone(set(dead), ranks, count)
                named = re.search(r"parts? of ranks? ([\d, ]+) of the run", said)
                assert named is not None
                assert named[1] == ", ".join(map(str, lost))
                enough = [copies for copies in range(ranks) if len(kept[copies]) == ranks]
                needed = re.search(r"--peer-copies (\d)", said)
                assert (needed and int(needed[1])) == (enough[0] if enough else None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peer_copies": 3}, "--peer-copies 3: of 3 ranks each has 2 more to hold its copies"),
        ({"peer_copies": 1, "recovery": "rollback"}, "under rollback the survivors hold the whole model"),
        ({"peer_every": 2}, "give both"),
        ({}, "give --save DIR and --save-every N, or --peer-copies N"),
    ],
)
def test_what_makes_no_sense_is_told(options: dict[str, Any], said: str) -> None:
    spec = TrainSpec("digits-mlp", Parallel("ddp", 3), steps=8, seed=1)
    with pytest.raises(UsageError, match=re.escape(said)):
        FailstopSpec(spec, **{"recovery": "restart", **options})
