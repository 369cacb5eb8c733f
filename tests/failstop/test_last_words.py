"""What the launching process hears last: a rank that has joined late may be heard only when another one is done."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from flipper.failstop.coordinator import Coordinator, RankLost
from flipper.failstop.kills import Kill
from flipper.failstop.messages import Joined
from flipper.failstop.run import train_through
from flipper.failstop.salvage import Salvage
from flipper.failstop.spec import FailstopSpec
from flipper.training.launch import Ranks
from flipper.training.layouts import Parallel
from flipper.training.pool import Pool
from flipper.training.run import train
from flipper.training.spec import TrainSpec, checkpoint_path


def test_a_recovery_is_told_though_the_first_rank_is_done_by_then() -> None:
    pipes = [Pipe() for _ in range(2)]
    for (_, rank), said in zip(pipes, [(Joined(1), "done"), ("done",)], strict=True):
        for word in said:
            rank.send(word)
    told: list[dict[str, Any]] = []
    job = FailstopSpec(TrainSpec("digits-mlp", Parallel.parse("ddp:2"), seed=1), recovery="lossy")
    ranks = Ranks([], [launcher for launcher, _ in pipes], "")
    Coordinator(
        ranks, job, told.append, generation=1, stage="joining", there={1}, since=time.monotonic(),
        detected=time.monotonic(),
    ).follow()  # fmt: skip
    assert [(event["event"], event["world_size"]) for event in told] == [("recovered", 2)]


@pytest.mark.parametrize("whole", [True, False], ids=["replicas", "parts"])
def test_what_was_said_before_a_death_is_heard_before_a_restart(whole: bool) -> None:
    """Of the last checkpoint, above all: a rank that talks much is heard more slowly than one that dies."""
    said = [{"event": "start", "step": 0}]
    said += [{"event": each, "step": step} for step in (1, 2, 3) for each in ("step", "saved")]
    pipes = [Pipe() for _ in range(2)]
    for message in said:
        pipes[0][1].send(message)
    pipes[1][1].close()
    told: list[dict[str, Any]] = []
    ranks = Ranks([], [launcher for launcher, _ in pipes], "")
    job = FailstopSpec(TrainSpec("digits-mlp", Parallel.parse("ddp:2"), seed=1), recovery="restart", peer_copies=1)
    at, pids = dict(enumerate(ranks.connections)), dict.fromkeys(range(2))
    follower = Salvage(at, pids, ranks.cause, told.append, 60.0, 0, copied=False)
    with pytest.raises(RankLost) as lost:
        (Coordinator(ranks, job, told.append) if whole else follower).follow()
    assert told == said
    assert (set(lost.value.died), lost.value.step) == ({1}, 4)


def test_a_death_in_the_first_step_of_a_resumed_run_is_told_with_its_step(tmp_path: Path) -> None:
    layout = Parallel.parse("ddp:2")
    train(TrainSpec("digits-mlp", layout, seed=1, steps=5, save=tmp_path))
    half = checkpoint_path(tmp_path, 5, "safetensors")
    spec = TrainSpec("digits-mlp", layout, steps=8, resume=half, save=tmp_path / "on", save_every=2)
    found = train_through(FailstopSpec(spec, (Kill(1, 6, 0),), "restart"))
    assert [(lost["rank"], lost["step"]) for lost in found.lost] == [(1, 6)]
    assert found.steps == 8


@pytest.mark.parametrize(
    ("layout", "recovery", "copies"), [("ddp:2", "lossy", 0), ("ddp:2", "restart", 1), ("fsdp:2", "restart", 1)]
)
def test_a_pool_can_call_off_a_run_whose_ranks_may_die(layout: str, recovery: str, copies: int) -> None:
    begun = threading.Event()
    job = FailstopSpec(
        TrainSpec("digits-mlp", Parallel.parse(layout), seed=1, steps=1_000_000, device="cpu"), recovery=recovery,
        peer_copies=copies,
    )  # fmt: skip
    pool = Pool(2)
    future = pool.submit_ranks(2, train_through, job, lambda event: begun.set() if event["event"] == "step" else None)
    assert begun.wait(60)
    assert pool.call_off(30)
    with pytest.raises(CancelledError):
        future.result()
