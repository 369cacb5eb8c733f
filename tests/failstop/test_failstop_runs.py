"""Runs whose ranks really die: what the survivors come to, against training by hand and by DistributedDataParallel."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import Death, trained
from real_runs import kill_launcher_after_a_death, same, weights
from safetensors.torch import load_file

from flipper.errors import TrainingError, UsageError
from flipper.failstop.kills import Kill
from flipper.failstop.run import FailstopResult, train_through
from flipper.failstop.spec import FailstopSpec
from flipper.training.faults_file import faults_of
from flipper.training.layouts import Parallel
from flipper.training.run import train
from flipper.training.spec import Event, TrainSpec


def run(
    ranks: int, kills: tuple[str, ...], recovery: str, folder: Path, *, recipe: str = "digits-mlp", steps: int = 12,
    events: list[Event] | None = None, timeout: float = 30.0, save_every: int = 4, **options: Any,
) -> FailstopResult:  # fmt: skip
    spec = TrainSpec(
        recipe, Parallel("ddp", ranks), steps=steps, seed=1, save=folder, save_every=save_every, timeout=timeout
    )
    job = FailstopSpec(spec, tuple(map(Kill.parse, kills)), recovery, **options)
    return train_through(job, (events if events is not None else []).append)


@pytest.mark.parametrize("recipe", ["digits-mlp", "digits-cnn", "mnist5k-cnn", "digits-bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_without_a_death_it_is_distributed_data_parallel_bit_for_bit(recipe: str, ranks: int, tmp_path: Path) -> None:
    """BatchNorm, dropout, AdamW, a schedule and parameters of two dtypes are among them."""
    there = train(TrainSpec(recipe, Parallel("ddp", ranks), steps=8, seed=1))
    here = run(ranks, (), "rollback", tmp_path, recipe=recipe, steps=8)
    assert (here.state_digest, here.resume_digest) == (there.state_digest, there.resume_digest)
    assert (here.loss, here.accuracy) == (there.loss, there.accuracy)


SCALED = """
from dataclasses import replace
import torch
from flipper.training.recipes import get

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = get("digits-mlp").model()
        self.register_buffer("scale", torch.ones(10))

    def forward(self, features):
        return self.inner(features) * self.scale

SCALED = replace(get("digits-mlp"), name="scaled", model=Scaled, cuts=())
"""


@pytest.mark.parametrize("reach", ["all", "one", "rank:1"])
def test_a_struck_buffer_is_what_distributed_data_parallel_makes_of_it(reach: str, tmp_path: Path) -> None:
    """The first replica's buffers are everyone's in the next pass, whose gradients depend on them here."""
    (tmp_path / "scaled.py").write_text(SCALED)
    faults = faults_of({"layer": ["model.scale"], "bits": "mantissa", "count": 4, "seed": 7})
    recipe = f"{tmp_path / 'scaled.py'}:SCALED"
    spec = TrainSpec(recipe, Parallel("ddp", 2), steps=4, seed=1, inject=faults, at=2, reach=reach)
    there, here = train(spec), train_through(FailstopSpec(spec, (), "lossy"))
    assert (here.state_digest, here.loss, here.accuracy) == (there.state_digest, there.loss, there.accuracy)


def test_the_buffers_of_a_rank_that_dies_between_steps_are_kept(tmp_path: Path) -> None:
    """They are everyone's from the end of each step on; the first survivor's own are of its own samples."""
    run(3, ("rank:0@step:6",), "lossy", tmp_path, recipe="digits-cnn", steps=6, save_every=5)
    resumed = TrainSpec("digits-cnn", Parallel("ddp", 2), steps=6, resume=tmp_path / "step-000005.safetensors")
    train(replace(resumed, save=tmp_path / "two"))
    lost, two = (load_file(folder / "step-000006.safetensors") for folder in (tmp_path, tmp_path / "two"))
    names = [name for name in two if "running" in name]
    assert names
    assert all(torch.equal(lost[name], two[name]) for name in names)


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
@pytest.mark.parametrize("ranks", [4, 5])
@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_a_death_in_each_bucket_comes_to_what_it_does_by_hand(
    recovery: str, ranks: int, bucket: int, tmp_path: Path
) -> None:
    result = run(ranks, (f"rank:1@step:6:bucket:{bucket}",), recovery, tmp_path)
    assert [(lost["rank"], lost["step"]) for lost in result.lost] == [(1, 6)]
    assert (result.world_size, result.steps) == (ranks - 1, 12)
    assert same(weights(tmp_path, 12), trained(ranks, 12, (Death(1, 6, bucket),), recovery))


def test_the_two_recoveries_differ_but_for_a_death_before_the_first_bucket(tmp_path: Path) -> None:
    """By hand; so that the tests above do tell them apart."""
    for bucket in (1, 2):
        deaths = (Death(1, 6, bucket),)
        assert not same(trained(4, 12, deaths, "rollback"), trained(4, 12, deaths, "lossy"))
    assert not same(trained(4, 12), trained(4, 12, (Death(1, 6, 2),), "lossy"))


CASES: dict[str, tuple[int, tuple[str, ...], tuple[Death, ...], dict[str, Any]]] = {
    "rank 0": (4, ("rank:0@step:6:bucket:1",), (Death(0, 6, 1),), {}),
    "the last rank, in the last bucket of the first step": (3, ("rank:2@step:1:bucket:2",), (Death(2, 1, 2),), {}),
    "two, one after the other": (
        5, ("rank:1@step:4:bucket:1", "rank:3@step:9:bucket:2"), (Death(1, 4, 1), Death(3, 9, 2)), {},
    ),
    "two in one step": (
        5, ("rank:1@step:4:bucket:1", "rank:4@step:4:bucket:2"), (Death(1, 4, 1), Death(4, 4, 2)), {},
    ),
    "two at once": (
        5, ("rank:1@step:4:bucket:1", "rank:2@step:4:bucket:1"), (Death(1, 4, 1), Death(2, 4, 1)), {},
    ),
    "one in the recovery from another": (
        5, ("rank:1@step:4:bucket:1", "rank:3@recovery:1"), (Death(1, 4, 1), Death(3, 4, 1)), {},
    ),
    "all but one": (
        3, ("rank:0@step:4:bucket:2", "rank:1@step:9:bucket:0"), (Death(0, 4, 2), Death(1, 9, 0)), {},
    ),
    "each rank keeps its number of samples": (
        4, ("rank:1@step:4:bucket:1",), (Death(1, 4, 1),), {"world_batch": "per-rank", "world_rate": "linear"},
    ),
    "the lost gradient counts as zero": (4, ("rank:1@step:4:bucket:1",), (Death(1, 4, 1),), {"lost_share": "zero"}),
}  # fmt: skip


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
@pytest.mark.parametrize("case", CASES)
def test_deaths_of_all_kinds_come_to_what_they_do_by_hand(case: str, recovery: str, tmp_path: Path) -> None:
    ranks, kills, deaths, options = CASES[case]
    events: list[Event] = []
    result = run(ranks, kills, recovery, tmp_path, events=events, **options)
    assert {lost["rank"] for lost in result.lost} == {death.worker for death in deaths}
    assert result.world_size == ranks - len(deaths)
    by_hand = trained(
        ranks, 12, deaths, recovery, per_rank=options.get("world_batch") == "per-rank",
        linear=options.get("world_rate") == "linear", zero=options.get("lost_share") == "zero",
    )  # fmt: skip
    assert same(weights(tmp_path, 12), by_hand)
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 13))


def test_a_death_before_a_step_is_that_step_among_the_others(tmp_path: Path) -> None:
    run(4, ("rank:2@step:6",), "lossy", tmp_path)
    assert same(weights(tmp_path, 12), trained(4, 12, (Death(2, 6),), "rollback"))


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
def test_with_dropout_and_batch_norm_the_same_death_repeats_to_the_bit(recovery: str, tmp_path: Path) -> None:
    kills = ("rank:2@step:5:bucket:1",)
    digests = {
        run(4, kills, recovery, tmp_path / str(each), recipe="digits-cnn").resume_digest for each in range(3)
    }
    assert len(digests) == 1


def test_restarted_a_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = train(TrainSpec("digits-cnn", Parallel("ddp", 3), steps=12, seed=1))
    events: list[Event] = []
    kills = ("rank:1@step:7:bucket:1", "rank:0@step:10")
    result = run(3, kills, "restart", tmp_path, recipe="digits-cnn", events=events)
    assert (result.state_digest, result.resume_digest) == (whole.state_digest, whole.resume_digest)
    assert [(lost["rank"], lost["step"]) for lost in result.lost] == [(1, 7), (0, 10)]
    assert [event["event"] for event in events if event["event"] in ("rank-lost", "recovered")] == [
        "rank-lost", "recovered", "rank-lost", "recovered"
    ]  # fmt: skip
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 9, 10, 11, 12]
    assert result.world_size == 3


@pytest.mark.parametrize(
    "layout", ["hooks:2", "fsdp:2", "tensor:2", "pipeline:2", "pipeline-1f1b:2", "ddp:2+pipeline:2", "fsdp:2+tensor:2"]
)
def test_a_lost_part_of_the_model_comes_back_from_the_checkpoint(layout: str, tmp_path: Path) -> None:
    parallel = Parallel.parse(layout)
    whole = train(TrainSpec("digits-mlp", parallel, steps=8, seed=1))
    spec = TrainSpec("digits-mlp", parallel, steps=8, seed=1, save=tmp_path, save_every=3)
    result = train_through(FailstopSpec(spec, (Kill(parallel.ranks - 1, step=6),), "restart"))
    assert [(lost["rank"], lost["step"]) for lost in result.lost] == [(parallel.ranks - 1, 6)]
    assert (result.state_digest, result.resume_digest) == (whole.state_digest, whole.resume_digest)


def test_before_the_first_checkpoint_a_run_restarts_from_its_beginning(tmp_path: Path) -> None:
    whole = train(TrainSpec("digits-mlp", Parallel("ddp", 2), steps=12, seed=1))
    assert run(2, ("rank:0@step:2",), "restart", tmp_path).state_digest == whole.state_digest


@pytest.mark.parametrize("recovery", ["rollback", "lossy", "restart"])
def test_a_rank_that_hangs_is_noticed_after_the_timeout_and_killed(recovery: str, tmp_path: Path) -> None:
    result = run(3, ("rank:1@step:6:bucket:1,signal:STOP",), recovery, tmp_path, timeout=2.0)
    (lost,) = result.lost
    assert lost["rank"] == 1
    seconds = lost["seconds_to_detect"]
    assert isinstance(seconds, float)
    assert seconds > 1.9
    if recovery == "restart":
        assert same(weights(tmp_path, 12), trained(3, 12))
    else:
        assert same(weights(tmp_path, 12), trained(3, 12, (Death(1, 6, 1),), recovery))


@pytest.mark.parametrize("layout", ["fsdp:2", "pipeline:2"])
def test_a_rank_that_hangs_with_a_part_of_the_model_is_killed_and_restarted(layout: str, tmp_path: Path) -> None:
    parallel = Parallel.parse(layout)
    whole = train(TrainSpec("digits-mlp", parallel, steps=8, seed=1))
    spec = TrainSpec("digits-mlp", parallel, steps=8, seed=1, save=tmp_path, save_every=3, timeout=2.0)
    result = train_through(FailstopSpec(spec, (Kill.parse("rank:1@step:6,signal:STOP"),), "restart"))
    assert [lost["rank"] for lost in result.lost] == [1]
    assert (result.state_digest, result.resume_digest) == (whole.state_digest, whole.resume_digest)


def test_too_few_survivors_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"2 of 4 ranks are left: fewer than --min-ranks 3"):
        run(4, ("rank:1@step:3", "rank:2@step:5"), "lossy", tmp_path, min_ranks=3)


def test_a_bucket_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the model has 3 buckets, 0 to 2"):
        run(2, ("rank:1@step:3:bucket:3",), "lossy", tmp_path)


CLIPPED = """
from dataclasses import replace
import torch
from flipper.training.recipes import get

def clipped(parameters):
    parameters = list(parameters)
    made = torch.optim.SGD(parameters, lr=0.1)
    made.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.01) and None)
    return made

CLIPPED = replace(get("digits-mlp"), name="clipped", optimizer=clipped)
"""


def test_clipping_is_refused_where_layers_are_updated_before_the_norm_is_known(tmp_path: Path) -> None:
    (tmp_path / "clipped.py").write_text(CLIPPED)
    spec = TrainSpec(f"{tmp_path / 'clipped.py'}:CLIPPED", Parallel("ddp", 2), steps=2, seed=1)
    with pytest.raises(UsageError, match="has hooks of its step, as for gradient clipping"):
        train_through(FailstopSpec(spec, (), "lossy"))


@pytest.mark.parametrize("step", [13, 4])
def test_a_step_that_the_run_does_not_have_is_told(step: int, tmp_path: Path) -> None:
    """Also one before the checkpoint that it goes on from."""
    train(TrainSpec("digits-mlp", Parallel("ddp", 2), steps=4, seed=1, save=tmp_path))
    spec = TrainSpec("digits-mlp", Parallel("ddp", 2), steps=12, resume=tmp_path / "step-000004.safetensors")
    with pytest.raises(UsageError, match="there is no such step; this run has the steps 5 to 12"):
        train_through(FailstopSpec(spec, (Kill(1, step=step),), "lossy"))


LATE = """
import time
from dataclasses import replace
import torch.distributed as dist
from flipper.training.recipes import get

meet = dist.barrier

def meet_and_dawdle(*arguments, **options):
    meet(*arguments, **options)
    if dist.get_rank() == 1:
        time.sleep(0.5)

dist.barrier = meet_and_dawdle
LATE = replace(get("digits-mlp"), name="late")
"""


@pytest.mark.parametrize(("layout", "bucket"), [("ddp:3", ""), ("ddp:3", ":bucket:1"), ("fsdp:3", "")])
@pytest.mark.parametrize("late", [False, True], ids=["together", "one late"])
def test_two_that_die_at_once_are_both_restarted_and_do_not_die_again(
    layout: str, bucket: str, late: bool, tmp_path: Path
) -> None:
    """Also when one is a little later to do so: by then the run is being restarted."""
    (tmp_path / "late.py").write_text(LATE)
    recipe = f"{tmp_path / 'late.py'}:LATE" if late else "digits-mlp"
    spec = TrainSpec(recipe, Parallel.parse(layout), steps=12, seed=1)
    whole = train(spec)
    events: list[Event] = []
    kills = [Kill.parse(f"rank:{rank}@step:7{bucket}") for rank in (1, 2)]
    job = FailstopSpec(replace(spec, save=tmp_path / "saved", save_every=4), tuple(kills), "restart")
    result = train_through(job, events.append)
    assert [lost["rank"] for lost in result.lost] == [1, 2]
    assert [event["step"] for event in events if event["event"] == "recovered"] == [4]
    assert result.state_digest == whole.state_digest


@pytest.mark.slow
@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
def test_ranks_killed_from_outside_at_any_moment_leave_survivors_that_agree(recovery: str, tmp_path: Path) -> None:
    """While they compute, average, evaluate or save; the replicas are compared after every step."""
    draw, killed = random.Random(), 0
    for attempt in range(4):
        events: list[Event] = []
        spec = TrainSpec(
            "digits-cnn", Parallel("ddp", 4), steps=60, seed=1, save=tmp_path / str(attempt), save_every=3,
            evaluate_every=2, probe_every=1, timeout=20.0,
        )  # fmt: skip
        started = threading.Event()

        def hear(event: Event, events: list[Event] = events, started: threading.Event = started) -> None:
            events.append(event)
            if event["event"] == "step":
                started.set()

        def kill(started: threading.Event = started) -> None:
            for _ in range(2):
                started.wait(60)
                time.sleep(draw.random() * 0.5)
                if victims := ranks_of_this_process():
                    os.kill(draw.choice(victims), signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        result = train_through(FailstopSpec(spec, recovery=recovery), hear)
        killer.join()
        assert result.steps == 60
        assert result.world_size == 4 - len(result.lost)
        assert all(event["equal"] for event in events if event["event"] == "replicas")
        assert sorted({event["step"] for event in events if event["event"] == "step"}) == list(range(1, 61))
        killed += len(result.lost)
    assert killed > 0


def ranks_of_this_process() -> list[int]:
    """The processes forked by the server that this process has started."""
    from multiprocessing import forkserver

    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """Also when it dies while they recover from a death."""
    kill_launcher_after_a_death(tmp_path, "--parallel", "ddp:3", "--recovery", "lossy", "--kill", "rank:1@step:50")
