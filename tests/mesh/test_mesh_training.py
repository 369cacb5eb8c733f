"""Training whose gradients go round failed chips, and round one that is lost on the way."""

import pytest
import torch
from mesh_commands import here
from safetensors.torch import load_file

from flipper.errors import TrainingError, UsageError
from flipper.failstop.kills import Kill
from flipper.failstop.run import train_through
from flipper.failstop.spec import FailstopSpec
from flipper.training.control import control
from flipper.training.layouts import Parallel
from flipper.training.run import train
from flipper.training.spec import TrainSpec

FIVE = {"parallel": Parallel.parse("ddp:5"), "allreduce": "mesh:2x3", "failed": ("0,1",)}
"""Chips of 2 x 3 without one."""


def spec(**options):
    return TrainSpec("digits-mlp", **{"steps": 4, "seed": 3, "timeout": 60.0, **options})


def weights(folder, step):
    return load_file(folder / f"step-{step:06d}.safetensors")


def trained(events=None, **options):
    heard = [] if events is None else events
    return train(spec(**options), heard.append)


def test_the_mean_is_that_of_the_sum_in_rank_order_and_replicas_stay_equal(tmp_path):
    events: list[dict] = []
    routed = trained(events, **FIVE, probe_every=1, save=tmp_path / "routed")
    ordered = trained(parallel=FIVE["parallel"], save=tmp_path / "ordered")
    compared = [event["equal"] for event in events if event["event"] == "replicas"]
    assert compared == [True] * 4
    assert routed.state_digest != ordered.state_digest  # another order of adding; else this would test nothing
    one, other = weights(tmp_path / "routed", 4), weights(tmp_path / "ordered", 4)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-6)


def test_a_resumed_run_is_exact():
    assert control(spec(**FIVE)).first_difference is None


@pytest.mark.parametrize("recovery", ["lossy", "rollback"])
def test_a_lost_chip_is_gone_round_without_a_restart(tmp_path, recovery):
    """12 chips of 4 x 4 round a board; the one at 2,1 dies while gradients are summed."""
    runs = {}
    for name, options in {
        "routed": {"allreduce": "mesh:4x4", "failed": ("2x2@0,2",), "probe_every": 1},
        "ordered": {},
    }.items():
        train_spec = spec(steps=3, parallel=Parallel.parse("ddp:12"), save=tmp_path / name, **options)
        events: list[dict] = []
        job = FailstopSpec(train_spec, (Kill.parse("rank:5@step:2:bucket:1"),), recovery)
        runs[name] = train_through(job, events.append), events
    result, events = runs["routed"]
    assert ([each["rank"] for each in result.lost], result.world_size, result.steps) == ([5], 11, 3)
    (rerouted,) = [event for event in events if event["event"] == "rerouted"]
    assert rerouted["failed"] == ["0,2", "0,3", "1,2", "1,3", "2,1"]
    assert all(event["equal"] for event in events if event["event"] == "replicas")
    one, other = weights(tmp_path / "routed", 3), weights(tmp_path / "ordered", 3)
    for name, tensor in one.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-6)


def test_a_loss_that_cuts_survivors_off_ends_the_run_with_the_reason():
    """2 x 3 without 0,1: the chip at 1,1 links both sides."""
    job = FailstopSpec(spec(**FIVE), (Kill.parse("rank:3@step:2"),), "lossy")
    with pytest.raises(TrainingError, match=r"can't go round .* no scheme serves this mesh: 2 of 4 survivors"):
        train_through(job)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parallel": Parallel.parse("ddp:6")}, "5 of its 6 chips live, and ddp:6 has 6 ranks; give --parallel ddp:5"),
        ({"parallel": Parallel.parse("hooks:5")}, "works under ddp:5, not under hooks:5"),
        ({"parallel": Parallel.parse("mpi:5")}, "works under ddp:5, not under mpi:5"),
        ({"allreduce": "ordered"}, "--failed says which chips of a mesh have failed"),
        ({"allreduce": "mesh"}, "rows x columns"),
        ({"allreduce": "tree"}, "give ordered, native, mesh:RxC"),
        ({"allreduce": "mesh:2x3:star"}, "mesh:RxC:ring or ring2d"),
        ({"failed": ("0,1", "1,1"), "parallel": Parallel.parse("ddp:4")}, "no scheme serves this mesh"),
    ],
)
def test_what_does_not_fit_is_told_before_ranks_are_started(options, said):
    with pytest.raises(UsageError, match=said):
        spec(**{**FIVE, **options})


def test_the_command_takes_mesh_and_holes():
    code, out, err = here("train", "digits-mlp", "--parallel", "ddp:4", "--allreduce", "mesh:2x3", "--failed", "0,1",
                          "--steps", "1", "--seed", "1")  # fmt: skip
    assert (code, out) == (2, "")
    assert "5 of its 6 chips live" in err


def test_the_command_says_by_which_schedule_it_sums():
    mesh = ["--parallel", "ddp:5", "--allreduce", "mesh:2x3:ring", "--failed", "0,1"]
    code, out, err = here("train", "digits-mlp", *mesh, "--steps", "1", "--seed", "1")
    assert (code, err) == (0, "allreduce by ring on 2x3: 3 of 5 hops over several links\n")
    assert '"steps":1' in out


def test_a_chip_that_hangs_is_gone_round():
    job = FailstopSpec(spec(**{**FIVE, "timeout": 3.0}), (Kill.parse("rank:0@step:2:bucket:1,signal:STOP"),), "lossy")
    result = train_through(job)
    assert (result.world_size, result.steps, [each["rank"] for each in result.lost]) == (4, 4, [0])
