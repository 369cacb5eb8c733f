"""The simulator: its states against real runs whose ranks die, its clock against sums by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from flipper.errors import UsageError
from flipper.failstop.costs import Costs
from flipper.failstop.failures import Failure, Trace
from flipper.failstop.kills import Kill
from flipper.failstop.run import train_through
from flipper.failstop.simulate import SimulationSpec, simulate
from flipper.failstop.spec import FailstopSpec
from flipper.training.layouts import Parallel
from flipper.training.run import train
from flipper.training.spec import TrainSpec

SECOND = Costs(step=1.0)
"""A step takes a second, whoever is there; buckets are averaged in no time."""

SIZES = {"digits-mlp": (1448, 8448, 16384), "digits-cnn": (20520, 18816, 768), "mnist5k-cnn": (44536, 192000, 13888)}
"""Bytes of the buckets."""


def in_bucket(recipe: str, number: int) -> float:
    """A moment of a step of SECOND at which bucket `number` is not averaged yet, and those before it are."""
    sizes = SIZES[recipe]
    ends = [1 / 3 + 2 / 3 * sum(sizes[: k + 1]) / sum(sizes) for k in range(len(sizes))]
    return (ends[number] + (ends[number - 1] if number else 0.0)) / 2


def simulated(
    recipe: str, workers: int, failures: list[Failure], recovery: str, *, steps: int = 10, costs: Costs = SECOND,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    spec = SimulationSpec(
        TrainSpec(recipe, steps=steps, seed=1), workers, (recovery,), Trace(failures), costs, **options
    )
    (row,) = simulate(spec)
    return row


@pytest.mark.parametrize("recipe", ["digits-mlp", "digits-cnn", "mnist5k-cnn"])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_without_failures_workers_are_ranks_bit_for_bit(recipe: str, workers: int) -> None:
    """With BatchNorm and dropout, each rank's own."""
    real = train(TrainSpec(recipe, Parallel("ddp", workers), steps=10, seed=1))
    row = simulated(recipe, workers, [], "rollback")
    assert (row["state_digest"], row["final_loss"], row["final_accuracy"]) == (
        real.state_digest, real.loss, real.accuracy
    )  # fmt: skip
    assert (row["failures"], row["accuracy_loss"], row["world_size_end"]) == (0, 0.0, workers)


DEATHS: list[tuple[str, int, tuple[tuple[int, int, int], ...], dict[str, Any]]] = [
    ("digits-mlp", 4, ((1, 4, 2),), {}),
    ("digits-cnn", 4, ((0, 4, 1),), {}),
    ("digits-cnn", 4, ((1, 3, 0), (3, 6, 2)), {}),
    ("digits-cnn", 3, ((2, 4, 1),), {"world_batch": "per-rank", "world_rate": "linear"}),
    ("digits-cnn", 3, ((2, 4, 1),), {"lost_share": "zero"}),
    ("mnist5k-cnn", 3, ((0, 2, 1), (1, 5, 1)), {}),
]


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
@pytest.mark.parametrize(("recipe", "workers", "deaths", "options"), DEATHS)
def test_what_survivors_come_to_is_what_real_ones_do(
    recipe: str, workers: int, deaths: tuple[tuple[int, int, int], ...], options: dict[str, Any], recovery: str
) -> None:
    kills = tuple(Kill(rank, step=step, bucket=bucket) for rank, step, bucket in deaths)
    job = FailstopSpec(TrainSpec(recipe, Parallel("ddp", workers), steps=10, seed=1), kills, recovery, **options)
    real = train_through(job)
    failures, clock = [], 0.0
    for rank, step, bucket in deaths:
        # rolled back, a step begins anew when the death is noticed, so that all after it come later
        failures.append(Failure(clock + step - 1 + in_bucket(recipe, bucket), rank))
        clock += in_bucket(recipe, bucket) if recovery == "rollback" else 0.0
    row = simulated(recipe, workers, failures, recovery, **options)
    assert (row["state_digest"], row["final_loss"]) == (real.state_digest, real.loss)
    assert (row["failures"], row["world_size_end"]) == (len(deaths), real.world_size)


def test_restarted_workers_end_as_if_nothing_had_happened() -> None:
    real = train(TrainSpec("digits-cnn", Parallel("ddp", 3), steps=10, seed=1))
    row = simulated("digits-cnn", 3, [Failure(4.5, 1), Failure(7.2, 0)], "restart", save_every=2)
    assert (row["state_digest"], row["failures"], row["accuracy_loss"]) == (real.state_digest, 2, 0.0)


COSTS = Costs(step=1.0, snapshot=0.01, detect=0.1, regroup=0.2, respawn=3.0, write=0.5, read=0.25)


@pytest.mark.parametrize(
    ("recovery", "failures", "seconds"),
    [
        ("rollback", [], 10 * 1.01),
        ("lossy", [], 10.0),
        ("restart", [], 10 + 3 * 0.5),  # after steps 4, 8 and 10
        # rolled back at 0.3 of its third step, which begins anew 0.3 later
        ("rollback", [Failure(2 * 1.01 + 0.01 + 0.3, 1)], 2 * 1.01 + 0.01 + 0.3 + 0.3 + 1 + 7 * 1.01),
        ("lossy", [Failure(2.3, 1)], 10.3),
        # in step 7, when step 4 was saved last
        ("restart", [Failure(6 + 0.5 + 0.3, 1)], 6 + 0.5 + 0.3 + 0.1 + 3 + 0.25 + 6 + 2 * 0.5),
        # again, while it comes back
        ("restart", [Failure(6.8, 1), Failure(9.0, 0)], 9.0 + 0.1 + 3 + 0.25 + 6 + 2 * 0.5),
    ],
)
def test_time_is_charged_as_the_costs_say(recovery: str, failures: list[Failure], seconds: float) -> None:
    row = simulated("digits-mlp", 3, failures, recovery, costs=COSTS, save_every=4)
    assert row["compute_seconds"] == pytest.approx(10)
    assert row["overhead_seconds"] == pytest.approx(seconds - 10)
    assert row["overhead_fraction"] == pytest.approx(seconds / 10 - 1)


def test_fewer_workers_take_longer_for_a_whole_batch_and_not_for_their_own_share() -> None:
    costs = Costs(sample=0.1)
    times = {
        batch: simulated("digits-mlp", 2, [Failure(0.0, 1)], "lossy", costs=costs, steps=5, world_batch=batch)
        for batch in ("fixed", "per-rank")
    }
    assert times["fixed"]["overhead_fraction"] == pytest.approx(4 / 5)  # four of five steps take twice as long
    assert times["per-rank"]["overhead_fraction"] == pytest.approx(0)


def test_too_few_survivors_end_a_strategy_and_no_other() -> None:
    failures = [Failure(1.5, 0), Failure(2.5, 1)]
    spec = SimulationSpec(
        TrainSpec("digits-mlp", steps=6, seed=1), 3, ("lossy", "restart"), Trace(failures), SECOND, save_every=2,
        min_ranks=2,
    )  # fmt: skip
    lossy, restart = simulate(spec)
    assert lossy["error"] == "fewer than 2 of 3 workers are left"
    assert (lossy["accuracy_loss"], lossy["state_digest"]) == (None, "")
    assert (restart["error"], restart["accuracy_loss"]) == (None, 0.0)


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
def test_batched_workers_come_to_nearly_the_same(recovery: str) -> None:
    failures = [Failure(3 + in_bucket("digits-mlp", 1), 2), Failure(6.2, 5)]
    rows = {
        mode: simulated("digits-mlp", 8, failures, recovery, steps=40, mode=mode) for mode in ("exact", "batched")
    }
    assert rows["batched"]["final_loss"] == pytest.approx(rows["exact"]["final_loss"], rel=1e-4)
    assert rows["batched"]["final_accuracy"] == pytest.approx(rows["exact"]["final_accuracy"], abs=0.01)
    assert rows["batched"]["world_size_end"] == 6


NORMED = """
from dataclasses import replace
from torch import nn
from flipper.training import recipes

class Own(nn.BatchNorm1d):
    pass

def model(norm):
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU(), nn.Flatten(),
        nn.Linear(216, 16), norm(16, affine=False), nn.ReLU(), nn.Linear(16, 10),
    )

mlp = recipes.get("digits-mlp")
normed = replace(mlp, name="normed", model=lambda: model(nn.BatchNorm1d), cuts=(), tensor_plan={})
own = replace(mlp, name="own", model=lambda: model(Own), cuts=(), tensor_plan={})
"""


@pytest.mark.parametrize("recovery", ["rollback", "lossy", "restart"])
@pytest.mark.parametrize("first", [0, 2])
def test_batched_workers_have_batch_norm_statistics_of_their_own(recovery: str, first: int, tmp_path: Path) -> None:
    """Running ones, too, which are those of the first that lives; shares of 64 samples among 7 are not all the same."""
    (tmp_path / "normed.py").write_text(NORMED)
    failures = [Failure(3.5, first), Failure(6.2, 5)]
    rows = {
        mode: simulated(f"{tmp_path / 'normed.py'}:normed", 7, failures, recovery, steps=20, mode=mode, save_every=3)
        for mode in ("exact", "batched")
    }
    assert rows["batched"]["final_loss"] == pytest.approx(rows["exact"]["final_loss"], rel=1e-4)
    assert rows["batched"]["final_accuracy"] == pytest.approx(rows["exact"]["final_accuracy"], abs=0.01)


def test_batched_workers_have_no_statistics_of_a_norm_that_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(NORMED)
    with pytest.raises(UsageError, match="knows the statistics of each worker for BatchNorm1d, 2d and 3d, not for Own"):
        simulated(f"{tmp_path / 'normed.py'}:own", 4, [], "lossy", mode="batched")


def test_clipping_is_refused_as_by_real_ranks(tmp_path: Path) -> None:
    (tmp_path / "clipped.py").write_text(
        "from dataclasses import replace\nimport torch\nfrom flipper.training.recipes import get\n"
        "class Clipping(torch.optim.SGD):\n    def step(self, closure=None):\n        return super().step(closure)\n"
        "def clipped(parameters):\n    return Clipping(parameters, lr=0.1)\n"
        'own = replace(get("digits-mlp"), optimizer=clipped)\n'
    )
    with pytest.raises(UsageError, match="is a Clipping with a step of its own, as for gradient clipping"):
        simulated(f"{tmp_path / 'clipped.py'}:own", 2, [], "lossy")


def test_more_workers_than_samples_are_told() -> None:
    with pytest.raises(UsageError, match="--workers 70: a batch has 64 samples; --batch-size sets it"):
        simulated("digits-mlp", 70, [], "lossy")
    assert simulated("digits-mlp", 70, [], "lossy", batch_size=70, steps=2)["world_size_end"] == 70


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
def test_of_a_run_that_ends_early_those_that_were_lost_last_are_not_left(recovery: str) -> None:
    row = simulated("digits-mlp", 4, [Failure(1.5, 2), Failure(3.5, 0), Failure(3.6, 1)], recovery, min_ranks=2)
    assert row["error"] == "fewer than 2 of 4 workers are left"
    assert (row["failures"], row["world_size_end"]) == (3, 1)


def test_a_strategy_is_given_once() -> None:
    spec = TrainSpec("digits-mlp", steps=2, seed=1)
    with pytest.raises(UsageError, match="--recovery lossy,restart,lossy: give each strategy once"):
        SimulationSpec(spec, 2, ("lossy", "restart", "lossy"), Trace([]), SECOND, save_every=1)


def test_a_trace_needs_to_be_told_how_often_to_save() -> None:
    with pytest.raises(UsageError, match="say by --save-every how often"):
        simulated("digits-mlp", 2, [], "restart")


def test_checkpoints_are_as_far_apart_as_young_and_daly_say() -> None:
    row = simulated("digits-mlp", 2, [], "restart", steps=30, costs=Costs(step=1.0, write=0.5), mtbf=100.0)
    assert row["save_every"] == math.isqrt(2 * 50)  # sqrt(2 x 0.5 x 100) seconds, of steps of one
    assert row["overhead_seconds"] == pytest.approx(3 * 0.5)


def test_costs_read_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text(COSTS.text())
    assert Costs.load(tmp_path / "costs.toml") == COSTS
