"""Checkpoints as far apart as Young and Daly say, from what steps and a save take in the run itself."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flipper.errors import OutputError
from flipper.failstop.kills import Kill
from flipper.failstop.run import train_through
from flipper.failstop.spec import FailstopSpec
from flipper.training.interval import Interval
from flipper.training.layouts import Parallel
from flipper.training.run import train
from flipper.training.spec import Event, TrainSpec


def spec(layout: str, folder: Path, mtbf: float, steps: int = 40) -> TrainSpec:
    return TrainSpec("digits-mlp", Parallel.parse(layout), steps=steps, seed=1, save=folder, mtbf=mtbf)


@pytest.mark.parametrize("layout", ["single", "ddp:2", "pipeline:2"])
def test_the_interval_follows_from_what_was_measured_and_is_kept_to(layout: str, tmp_path: Path) -> None:
    """After nine steps, of which the first is not timed; and always at the end."""
    events: list[Event] = []
    result = train(spec(layout, tmp_path, 0.5), events.append)
    (told,) = [event for event in events if event["event"] == "interval"]
    assert told["step"] == 9
    best = math.sqrt(2 * told["save_seconds"] * 0.5) / told["step_seconds"]
    assert told["save_every"] == max(1, round(best))
    steps = sorted({*range(9, 41, told["save_every"]), 40})
    assert [event["step"] for event in events if event["event"] == "saved"] == steps
    assert result.record()["interval"] == {key: told[key] for key in told if key not in ("event", "step")}
    assert result.state_digest == train(TrainSpec("digits-mlp", Parallel.parse(layout), steps=40, seed=1)).state_digest


def test_the_first_step_is_not_among_those_that_are_timed() -> None:
    interval = Interval(mtbf=200.0, begin=100)
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 1000.0, 1000.0):
        interval.note(seconds)
    assert interval.chosen(4.0) == {
        "save_every": 8, "step_seconds": 5.0, "save_seconds": 4.0, "mtbf_seconds": 200.0  # sqrt(2 x 4 x 200) = 40 s
    }  # fmt: skip
    assert [step for step in range(100, 130) if interval.due(step)] == [109]
    interval.every = 8
    assert [step for step in range(100, 130) if interval.due(step)] == [109, 117, 125]


@pytest.mark.parametrize("layout", ["ddp:3", "pipeline:2"])
def test_a_run_restarts_from_such_a_checkpoint_and_measures_anew(layout: str, tmp_path: Path) -> None:
    events: list[Event] = []
    job = FailstopSpec(spec(layout, tmp_path, 1e-6), (Kill(1, step=14),), "restart")
    result = train_through(job, events.append)
    (restarted,) = [event["step"] for event in events if event["event"] == "recovered"]
    assert restarted in (12, 13)  # the first rank may have been writing the last one
    assert [event["step"] for event in events if event["event"] == "interval"] == [9, restarted + 9]
    assert result.state_digest == train(TrainSpec("digits-mlp", Parallel.parse(layout), steps=40, seed=1)).state_digest


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
def test_survivors_keep_the_same_interval(recovery: str, tmp_path: Path) -> None:
    events: list[Event] = []
    train_through(FailstopSpec(spec("ddp:3", tmp_path, 1e-6), (Kill(0, step=14, bucket=1),), recovery), events.append)
    assert [event["step"] for event in events if event["event"] == "saved"] == list(range(9, 41))


def test_a_checkpoint_that_may_be_in_the_way_is_told_before_the_first_step(tmp_path: Path) -> None:
    """At any step: nobody knows yet where one will be written."""
    train(TrainSpec("digits-mlp", steps=23, seed=1, save=tmp_path))
    with pytest.raises(OutputError, match=r"step-000023\.safetensors exists"):
        train(spec("single", tmp_path, 1.0))


def flipper(folder: Path, *arguments: str) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, "-m", "flipper", "train", "digits-mlp", "--seed", "1", *arguments], cwd=folder,
        env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_the_record_says_what_was_chosen_and_from_what(tmp_path: Path) -> None:
    options = ("--steps", "12", "--save", "run", "--save-every", "auto", "--mtbf", "1.5d", "-q")
    code, out, err = flipper(tmp_path, *options)
    assert (code, err) == (0, "")
    interval = json.loads(out)["interval"]
    assert set(interval) == {"save_every", "step_seconds", "save_seconds", "mtbf_seconds"}
    assert interval["mtbf_seconds"] == 1.5 * 86400
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == [
        "step-000009.safetensors", "step-000012.safetensors"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--save", "run", "--save-every", "auto"), "from --mtbf DURATION: give both"),
        (("--save", "run", "--save-every", "5", "--mtbf", "2h"), "from --mtbf DURATION: give both"),
        (("--save-every", "auto", "--mtbf", "2h"), "--save-every needs --save DIR"),
        (("--save", "run", "--save-every", "auto", "--mtbf", "often"), "is no duration above 0"),
        (("--save", "run", "--save-every", "often"), "'often' is neither a whole number from 1 nor 'auto'"),
        (("--save", "run", "--save-every", "0"), "'0' is neither a whole number from 1 nor 'auto'"),
    ],
)
def test_what_makes_no_sense_is_told(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, out, err = flipper(tmp_path, "--steps", "4", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert not (tmp_path / "run").exists()
