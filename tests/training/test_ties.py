"""A parameter with several names is one parameter: in training, in checkpoints, and when it is struck."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from series import Run, spec, train_all

import flipper
from flipper.errors import MismatchError, UsageError
from flipper.training.control import control
from flipper.training.faults_file import faults_of, read_faults
from flipper.training.run import train

# Both encoders share a weight, and two modules a buffer; the name that comes first in the model is not the first by
# code point. TIED may be cut behind what is tied, PARTED within, and SPLIT would make one of the two a DTensor.
TIED = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from dataclasses import replace
from collections import OrderedDict
from flipper.training import Data, Recipe, accuracy

def data(folder):
    features = torch.rand(64, 4)
    targets = (features.sum(dim=1) > 2).long()
    return Data(features[:48], targets[:48], features[48:], targets[48:])

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x):
        return x * self.factor

def model():
    net = nn.Sequential(OrderedDict(
        z=nn.Linear(4, 4), scale=Scale(), b=nn.Linear(4, 4), again=Scale(), head=nn.Linear(4, 2)
    ))
    net.b.weight = net.z.weight
    net.again.factor = net.scale.factor
    return net

def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)

TIED = Recipe("tied", model, data, nn.functional.cross_entropy, accuracy, adam, 16, cuts=("head",))
PARTED = replace(TIED, name="parted", cuts=("b",))
SPLIT = replace(TIED, name="split", tensor_plan={"b": ColwiseParallel()})
"""

LAYOUTS = ("single", "ddp:2", "hooks:2", "fsdp:2", "pipeline:2")
NAMES = ("model.b.weight", "model.z.weight")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file's name, up to the recipe's own."""
    file = tmp_path_factory.mktemp("recipe") / "tied.py"
    file.write_text(TIED)
    return f"{file}:"


@pytest.fixture(scope="module")
def runs(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Five steps under each layout, each step saved."""
    folder = tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {"steps": 5, "save_every": 1}
    return {
        layout: train_all([spec(f"{recipe}TIED", layout, save=folder / layout.replace(":", ""), **options)])[0]
        for layout in LAYOUTS
    }


def test_layouts_agree_on_a_tied_parameter(runs: dict[str, Run]) -> None:
    """It gets the sum of both gradients; by plain torch, first."""
    ddp = runs["ddp:2"]
    assert {runs[each].state_digest for each in ("hooks:2", "fsdp:2")} == {ddp.state_digest}
    for run in runs.values():
        assert run.losses == pytest.approx(runs["single"].losses, rel=1e-5)
    before, after = (load_file(runs["single"].files[step]) for step in (0, 1))
    first, second = (torch.from_numpy(each["optimizer.b.weight.exp_avg"]) for each in (before, after))
    assert (first != second).all()
    assert "optimizer.z.weight.exp_avg" not in before


@pytest.mark.parametrize(
    ("layout", "checkpoint_format"),
    [("single", "hdf5"), ("ddp:2", "safetensors"), ("fsdp:2", "pytorch"), ("pipeline:2", "safetensors")],
)
def test_the_control_holds(recipe: str, layout: str, checkpoint_format: str) -> None:
    verdict = control(spec(f"{recipe}TIED", layout, steps=3, checkpoint_format=checkpoint_format))
    assert verdict.first_difference is None


def test_a_file_holds_it_once_under_its_first_name_by_code_point(
    recipe: str, runs: dict[str, Run], tmp_path: Path
) -> None:
    """Read without flipper."""
    file = Path(runs["fsdp:2"].files[-1])
    with safe_open(file, "numpy") as held:
        assert [name for name in NAMES if name in held.keys()] == ["model.b.weight"]  # noqa: SIM118
    others = [
        spec(f"{recipe}TIED", steps=5, resume=file, save=tmp_path, checkpoint_format=each)
        for each in ("pytorch", "hdf5")
    ]
    pytorch, hdf5 = (Path(run.files[0]) for run in train_all(others))
    model = torch.load(pytorch, weights_only=True)["model"]
    assert model["b.weight"].data_ptr() == model["z.weight"].data_ptr()
    assert model["again.factor"].data_ptr() == model["scale.factor"].data_ptr()
    with h5py.File(hdf5) as held:
        assert held["model"]["b.weight"] == held["model"]["z.weight"]  # the same object, by a hard link
    for path in (file, pytorch, hdf5):
        tensors = {tensor.name: tensor for tensor in flipper.open(path).tensors}
        assert list(tensors["model.b.weight"].aliases) == ["model.z.weight"]
        assert "model.z.weight" not in tensors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", NAMES)
def test_struck_under_either_name_it_equals_the_run_from_the_altered_file(
    recipe: str, runs: dict[str, Run], tmp_path: Path, layout: str, pattern: str
) -> None:
    clean = Path(runs[layout].files[1])
    table: dict[str, Any] = {"layer": [pattern], "bits": "exponent", "direction": "1to0", "count": 3, "seed": 5}
    path = tmp_path / "altered.safetensors"
    model = flipper.FaultModel(layers=[pattern], bits="exponent", direction="1to0", count=3)
    flipper.inject(clean, path, flipper.draw(clean, model, seed=5))
    resumed, live, recorded = train_all(
        [
            spec(f"{recipe}TIED", layout, steps=4, resume=path),
            spec(f"{recipe}TIED", layout, steps=4, inject=faults_of(table), at=2),
            spec(f"{recipe}TIED", layout, steps=4, inject=read_faults(Path(f"{path}.flipper.json")), at=2),
        ]
    )
    assert resumed.digests == live.digests == recorded.digests
    assert resumed.losses[0] != runs[layout].losses[2]


@pytest.mark.parametrize(("name", "layout"), [("PARTED", "pipeline:2"), ("SPLIT", "tensor:2")])
def test_a_layout_that_would_part_it_is_refused(recipe: str, name: str, layout: str) -> None:
    message = f"{layout} parts b.weight and z.weight, which {name.lower()} ties; run it under another layout"
    with pytest.raises(UsageError) as caught:
        train(spec(f"{recipe}{name}", layout, steps=1))
    assert str(caught.value) == message


def test_a_file_in_which_the_names_differ_is_refused(recipe: str, runs: dict[str, Run], tmp_path: Path) -> None:
    """As a rewriting that knows of no ties may leave it; equal bytes under both names are taken."""
    arrays = load_file(runs["single"].files[2])
    arrays["model.scale.factor"] = arrays["model.again.factor"]
    for changed in (False, True):
        arrays["model.z.weight"] = arrays["model.b.weight"].copy()
        if changed:
            arrays["model.z.weight"][0, 0] += struct.unpack("<f", b"\0\0\0\x3f")[0]
        save_file(arrays, tmp_path / "both.safetensors")
        resumed = spec(f"{recipe}TIED", steps=5, resume=tmp_path / "both.safetensors")
        if changed:
            message = "TIED ties model.b.weight and model.z.weight, but they differ in the checkpoint"
            with pytest.raises(MismatchError, match=message):
                train(resumed)
        else:
            assert train(resumed).state_digest == runs["single"].state_digest
