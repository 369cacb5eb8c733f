"""Restarts: from which checkpoints a run goes on to the bit, and what others lacked; known from how recipes work."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from study_bodies import altered

from flipper.study.checkpoint import study
from flipper.study.spec import CONTENTS, StudySpec
from flipper.training.launch import run_ranks
from flipper.training.spec import Event

LACKING = {
    # BatchNorm and dropout, Adam, no schedule
    "digits-cnn": {
        "parameters": ["buffers", "optimizer", "data position", "RNG"],
        "model": ["optimizer", "data position", "RNG"],
        "optimizer": ["data position", "RNG"],
        "all": [],
    },
    # nothing random in a step, no buffers, no schedule
    "digits-mlp": {
        "parameters": ["optimizer", "data position"],
        "model": ["optimizer", "data position"],
        "optimizer": ["data position"],
        "all": [],
    },
    # the same, and dropout, with a schedule
    "mnist5k-cnn": {
        "parameters": ["buffers", "optimizer", "scheduler", "data position", "RNG"],
        "model": ["optimizer", "scheduler", "data position", "RNG"],
        "optimizer": ["scheduler", "data position", "RNG"],
        "all": [],
    },
}


@pytest.mark.parametrize(
    ("recipe", "ranks", "contents"),
    [
        ("digits-cnn", 1, CONTENTS),
        ("digits-cnn", 2, ("model", "all")),
        ("digits-mlp", 1, ("model", "optimizer")),
        ("mnist5k-cnn", 1, ("optimizer", "all")),
    ],
)
def test_what_is_missing_is_found(recipe: str, ranks: int, contents: tuple[str, ...]) -> None:
    spec = StudySpec(recipe, formats=("safetensors",), contents=contents, ranks=(ranks,), repeat=1, seed=7)
    found = study(spec)
    assert {row["content"]: row["missing"] for row in found.rows} == {each: LACKING[recipe][each] for each in contents}
    assert [row["deterministic"] for row in found.rows] == [content == "all" for content in contents]
    assert all(row["epoch_share"] > 0 for row in found.rows)


@pytest.mark.parametrize("kind", ["ddp", "tensor", "pipeline"])
def test_every_layout_goes_on_from_shards_saved_beside_training(kind: str) -> None:
    spec = StudySpec("digits-cnn", formats=("dcp", "pytorch"), ranks=(2,), modes=("sync", "async"), kind=kind, repeat=1)
    found = study(spec)
    rows = {(row["format"], row["mode"]): row for row in found.rows}
    assert rows.keys() == {("dcp", "sync"), ("dcp", "async"), ("pytorch", "sync")}
    assert [row["missing"] for row in rows.values()] == [[], [], []]
    assert rows["dcp", "sync"]["stall_seconds"] == rows["dcp", "sync"]["save_seconds"]
    assert rows["dcp", "async"]["stall_seconds"] > 0


def test_a_checkpoint_that_lost_a_bit_is_said_to_have(tmp_path: Path) -> None:
    events: list[Event] = []
    spec = StudySpec("digits-mlp", formats=("npz",), repeat=1, seed=7)
    run_ranks(functools.partial(altered, spec, tmp_path), 1, events.append)
    assert [event["missing"] for event in events] == [[], ["the values of model.fc1.weight"]]
