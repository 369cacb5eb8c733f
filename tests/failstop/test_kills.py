"""Kills: what WHO@WHEN may say, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flipper.errors import UsageError
from flipper.failstop.kills import Kill, check
from flipper.failstop.spec import FailstopSpec
from flipper.training.layouts import Parallel
from flipper.training.spec import TrainSpec


@pytest.mark.parametrize(
    ("text", "kill"),
    [
        ("rank:1@step:20", Kill(1, step=20)),
        ("rank:0@step:1:bucket:0", Kill(0, step=1, bucket=0)),
        ("rank:12@step:7:bucket:2,signal:STOP", Kill(12, step=7, bucket=2, signal="STOP")),
        ("rank:3@recovery:2", Kill(3, recovery=2)),
    ],
)
def test_a_kill_reads_as_it_is_written(text: str, kill: Kill) -> None:
    assert Kill.parse(text) == kill
    assert str(kill) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rank:1",
        "rank:1@",
        "1@step:2",
        "rank:-1@step:2",
        "rank:1@step:x",
        "rank:1@epoch:2",
        "rank:1@bucket:2",
        "rank:1@step:2:bucket:",
        "rank:1@step:2,signal:TERM",
        "rank:1@step:2 ",
        "rank:9999999999@step:2",
        "rank:\u0661@step:2",
    ],
)
def test_what_is_no_kill_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=r"--kill .*: say who and when"):
        Kill.parse(text)


@pytest.mark.parametrize(
    ("kills", "said"),
    [
        (("rank:4@step:2",), "no such rank; the layout has ranks 0 to 3"),
        (("rank:1@step:0",), "the first step is 1"),
        (("rank:1@step:2", "rank:0@recovery:0"), "so is the first recovery"),
        (("rank:1@step:2", "rank:1@step:3"), "rank 1 is killed twice"),
        (tuple(f"rank:{rank}@step:2" for rank in range(4)), "all 4 ranks would die"),
    ],
)
def test_kills_that_cannot_be_are_told(kills: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(tuple(map(Kill.parse, kills)), 4)


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        ("ddp:1", {}, "--recovery needs 2 ranks or more, and ddp:1 has 1"),
        ("single", {"recovery": "restart"}, "--recovery needs 2 ranks or more, and single has 1"),
        ("pipeline:2", {}, "works under ddp:N and mpi:N, not under pipeline:2: --recovery restart does"),
        ("ddp:2+pipeline:2", {}, r"not under ddp:2\+pipeline:2"),
        ("ddp:2", {"recovery": "restart"}, "give --save DIR and --save-every N, or --peer-copies N"),
        ("ddp:2", {"recovery": "hope"}, "'hope' is none of restart, rollback, lossy"),
        ("ddp:2", {"world_batch": "half"}, "--world-batch 'half' is none of fixed, per-rank"),
        ("ddp:2", {"min_ranks": 3}, "--min-ranks 3: the layout has 2 ranks"),
    ],
)
def test_runs_that_cannot_be_are_told(layout: str, options: dict[str, object], said: str) -> None:
    train = TrainSpec("digits-mlp", Parallel.parse(layout), seed=1)
    with pytest.raises(UsageError, match=said):
        FailstopSpec(train, **{"recovery": "lossy", **options})  # type: ignore[arg-type]


def test_ranks_that_hold_a_part_of_the_model_die_between_steps() -> None:
    train = TrainSpec("digits-mlp", Parallel.parse("fsdp:2"), seed=1, save=Path("x"), save_every=2)
    with pytest.raises(UsageError, match="under fsdp:2 ranks die before a step, as rank:1@step:20"):
        FailstopSpec(train, (Kill(1, step=2, bucket=0),), "restart")


def test_steps_that_are_taken_twice_are_refused() -> None:
    with pytest.raises(UsageError, match="--detect replay takes each step twice"):
        FailstopSpec(TrainSpec("digits-mlp", Parallel.parse("ddp:2"), seed=1, detect=("replay",)), (), "lossy")


def test_sums_of_the_backends_own_are_refused() -> None:
    with pytest.raises(UsageError, match="sums gradients in rank order"):
        FailstopSpec(TrainSpec("digits-mlp", Parallel.parse("ddp:2"), seed=1, allreduce="native"), recovery="lossy")


def test_ranks_that_come_back_may_all_die_and_die_again() -> None:
    kills = [Kill.parse(f"rank:{rank}@step:{step}") for rank, step in ((0, 2), (1, 2), (0, 3))]
    check(kills, 2, come_back=True)
    with pytest.raises(UsageError, match="rank 0 is killed twice"):
        check([*kills, kills[0]], 2, come_back=True)


@pytest.mark.parametrize("recovery", [None, "restart"])
def test_nobody_dies_in_a_recovery_that_nobody_survives(recovery: str | None) -> None:
    spec = TrainSpec("digits-mlp", Parallel("ddp", 3), seed=1)
    with pytest.raises(UsageError, match="only where others survive, under --recovery rollback and lossy"):
        FailstopSpec(spec, (Kill(0, step=3), Kill(1, recovery=1)), recovery, peer_copies=recovery == "restart")
