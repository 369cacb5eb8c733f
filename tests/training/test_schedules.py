"""Torch's own schedules and optimizers resume exactly, and a schedule's state has all that it moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from series import spec, train_all

import flipper
from flipper.errors import MismatchError
from flipper.training.faults_file import faults_of
from flipper.training.run import train

SCHEDULES = {
    "chained": "L.ChainedScheduler([L.LinearLR(o), L.ExponentialLR(o, 0.9)])",
    "cosine": "L.CosineAnnealingLR(o, 20)",
    "cyclic": "L.CyclicLR(o, 0.01, 0.1, step_size_up=2)",
    "exponential": "L.ExponentialLR(o, 0.9)",
    "milestones": "L.MultiStepLR(o, [1, 3])",
    "one": "L.OneCycleLR(o, 0.1, total_steps=20)",
    "sequential": "L.SequentialLR(o, [L.LinearLR(o), L.CosineAnnealingLR(o, 10)], [2])",
    "warm": "L.CosineAnnealingWarmRestarts(o, 3)",
}
OPTIMIZERS = {
    "adadelta": "Adadelta(p)",
    "adafactor": "Adafactor(p)",
    "adagrad": "Adagrad(p)",
    "adam": "Adam(p)",
    "amsgrad": "Adam(p, amsgrad=True)",
    "asgd": "ASGD(p)",
    "fused": "AdamW(p, fused=True)",
    "groups": "SGD([{'params': [next(p)], 'lr': 0.02}, {'params': [*p], 'nesterov': False}], lr=0.1, momentum=0.9)",
    "nadam": "NAdam(p)",
    "radam": "RAdam(p)",
    "rmsprop": "RMSprop(p, momentum=0.5, centered=True)",
    "rprop": "Rprop(p)",
    "sgd": "SGD(p, lr=0.1, momentum=0.9)",
    "tensor": "AdamW(p, lr=torch.tensor(0.01))",
}
NO_SHARDS = ("adafactor", "rprop")
"""What torch itself can't step on FSDP's shards."""

HEAD = """
import torch
from dataclasses import replace
from torch import nn
from torch.optim import *
from torch.optim import lr_scheduler as L
from flipper.training import Data, Recipe, accuracy

def data(folder):
    features = torch.rand(64, 4)
    targets = (features.sum(dim=1) > 2).long()
    return Data(features[:48], targets[:48], features[48:], targets[48:])

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

BASE = Recipe("base", model, data, nn.functional.cross_entropy, accuracy, SGD, 16, cuts=("2",))
"""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Full names: of each optimizer alone, and of each schedule with SGD, Adam, and a rate that is a tensor."""
    lines = [f"{name} = replace(BASE, name={name!r}, optimizer=lambda p: {call})" for name, call in OPTIMIZERS.items()]
    for schedule, call in SCHEDULES.items():
        for each in ("sgd", "adam", "tensor", "groups"):
            if (schedule, each) != ("cyclic", "tensor"):  # torch refuses that
                lines.append(f"{schedule}_{each} = replace({each}, name='own', schedule=lambda o: {call})")
    file = tmp_path_factory.mktemp("recipes") / "own.py"
    file.write_text("\n".join([HEAD, *lines]))
    return {name: f"{file}:{name}" for name in (line.partition(" ")[0] for line in lines)}


@pytest.mark.parametrize("layout", ["single", "fsdp:2", "pipeline:2"])
def test_every_schedule_and_every_optimizer_resumes_exactly(
    recipes: dict[str, str], tmp_path: Path, layout: str
) -> None:
    """Stopped after two of five steps; each step is taken twice and compared, which must change nothing."""
    names = [name for name in recipes if layout != "fsdp:2" or name not in NO_SHARDS]
    whole = train_all(
        [spec(recipes[name], layout, steps=5, save=tmp_path / name, save_every=2, detect=("replay",)) for name in names]
    )
    stopped = {name: Path(run.files[0]) for name, run in zip(names, whole, strict=True)}
    rest = train_all([spec(recipes[name], layout, steps=5, resume=path) for name, path in stopped.items()])
    plain = train_all([spec(recipes[name], layout, steps=5) for name in names])
    for name, run, resumed, once in zip(names, whole, rest, plain, strict=True):
        assert run.digests == resumed.digests, name
        assert run.digests == once.digests, name
        assert run.detected == [], name
        assert once.losses[2:] == resumed.losses, name


@pytest.mark.parametrize("name", ["one_sgd", "one_adam", "cyclic_sgd", "cyclic_adam", "cosine_adam"])
def test_a_momentum_that_a_schedule_cycles_is_saved_as_torch_has_it(
    recipes: dict[str, str], tmp_path: Path, name: str
) -> None:
    """And nothing more where it cycles none."""
    run = train(spec(recipes[name], steps=3, save=tmp_path))
    parameter = torch.nn.Parameter(torch.zeros(1))
    names: dict[str, Any] = {"L": torch.optim.lr_scheduler, "p": [parameter]}
    schedule, _, kind = name.partition("_")
    optimizer = names["o"] = eval(f"torch.optim.{OPTIMIZERS[kind]}", {"torch": torch}, names)
    own = eval(SCHEDULES[schedule], names)
    for _ in range(3):
        optimizer.step()
        own.step()
    saved = load_file(run.files[0])
    found = {key.removeprefix("scheduler.groups.0."): saved[key] for key in saved if key.startswith("scheduler.groups")}
    (group,) = optimizer.param_groups
    assert list(found) == ([] if schedule == "cosine" else ["momentum" if kind == "sgd" else "betas"])
    for key, value in found.items():
        assert value.dtype == "float64"
        assert tuple(value.reshape(-1)) == (group[key] if kind == "adam" else (group[key],))
    assert saved["scheduler._last_lr"].tolist() == [group["lr"]]


def test_a_cycled_momentum_can_be_struck_live_as_in_the_file(recipes: dict[str, str], tmp_path: Path) -> None:
    table: dict[str, Any] = {"layer": ["scheduler.groups.0.momentum"], "bits": "exponent", "max_abs": 1, "count": 2}
    options: dict[str, Any] = {"steps": 4}
    (clean,) = train_all([spec(recipes["one_sgd"], **options, save=tmp_path, save_every=2)])
    model = flipper.FaultModel(layers=table["layer"], bits="exponent", max_abs=1, count=1)
    plan = flipper.draw(clean.files[0], model, seed=1)
    flipper.inject(clean.files[0], tmp_path / "altered.safetensors", plan)
    live, resumed = train_all(
        [
            spec(recipes["one_sgd"], **options, inject=faults_of({**table, "count": 1, "seed": 1}), at=2),
            spec(recipes["one_sgd"], **options, resume=tmp_path / "altered.safetensors"),
        ]
    )
    assert live.digests == resumed.digests
    assert live.state_digest != clean.state_digest


def test_a_checkpoint_of_a_schedule_that_cycles_less_is_refused(recipes: dict[str, str], tmp_path: Path) -> None:
    (other,) = train_all([spec(recipes["cosine_sgd"], steps=2, save=tmp_path)])
    with pytest.raises(MismatchError, match=r"^can't resume: scheduler\.\S+ is missing, or of another schedule than"):
        train(spec(recipes["one_sgd"], steps=4, resume=Path(other.files[0])))


def test_state_that_belongs_to_no_one_element_is_refused_where_shards_would_need_it(
    recipes: dict[str, str], tmp_path: Path
) -> None:
    (run,) = train_all([spec(recipes["adafactor"], steps=2, save=tmp_path)])
    with pytest.raises(MismatchError, match=r"^can't resume: fsdp:2 parts 0\.weight, and \S+ fits no shard of it$"):
        train(spec(recipes["adafactor"], "fsdp:2", steps=4, resume=Path(run.files[0])))
