"""Checkpoints by torch.distributed.checkpoint: read by torch alone, gone on from, struck, tied, whole or not at all."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_bodies import train_with_small_files
from processes import ranks_below, wait_until
from safetensors.torch import load_file, save_file
from series import spec

from flipper.cli import main
from flipper.errors import OutputError
from flipper.training.launch import run_ranks
from flipper.training.run import nothing_unfinished, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LAYOUTS = ("single", "ddp:2", "fsdp:3", "tensor:2", "ddp:2+pipeline:2", "fsdp:2+tensor:2")
FILES = {"fsdp:3": 3, "tensor:2": 2, "ddp:2+pipeline:2": 4, "fsdp:2+tensor:2": 4}
"""Files of data: one a rank where no rank has all."""

TIED = """
import torch
from torch import nn
from flipper.training import Data, Recipe, accuracy

def data(folder):
    features = torch.rand(64, 8, generator=torch.Generator().manual_seed(1))
    targets = (features.sum(dim=1) > 4).long()
    return Data(features[:48], targets[:48], features[48:], targets[48:])

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)

def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)

OWN = Recipe("own", Twice, data, nn.functional.cross_entropy, accuracy, adam, 16, schedule=cosine)
"""


def loaded(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What dcp.load gives, without flipper."""
    state = {name: torch.full_like(tensor, 1) for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=path)
    return state


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_alone_loads_what_the_same_run_saves_in_a_file(tmp_path: Path, layout: str) -> None:
    for checkpoint_format in ("dcp", "safetensors"):
        train(spec("digits-cnn", layout, seed=3, steps=2, save=tmp_path, checkpoint_format=checkpoint_format))
    path, expected = tmp_path / "step-000002.dcp", load_file(tmp_path / "step-000002.safetensors")
    assert same(loaded(path, expected), expected)
    reader = dcp.FileSystemReader(path)
    assert reader.read_metadata().state_dict_metadata.keys() == expected.keys()
    assert len(list(path.glob("*.distcp"))) == FILES.get(layout, 1)


def test_a_nested_state_dict_of_a_plain_model_is_filled(tmp_path: Path) -> None:
    train(spec("digits-cnn", "fsdp:2", seed=3, steps=1, save=tmp_path, checkpoint_format="dcp"))
    model = torch.nn.Sequential()
    for name, child in [("conv1", torch.nn.Conv2d(1, 16, 3)), ("bn1", torch.nn.BatchNorm2d(16))]:
        model.add_module(name, child)
    before = model.conv1.weight.clone()
    dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "step-000001.dcp")
    assert not torch.equal(model.conv1.weight, before)
    assert (tmp_path / "last").read_text() == "step-000001.dcp\n"


@pytest.mark.parametrize("layout", ["single", "fsdp:2"])
def test_tied_parameters_and_a_schedule_are_saved_once_struck_and_gone_on_from(tmp_path: Path, layout: str) -> None:
    """A struck directory is the same as a file with the same bits struck by hand, for another layout, too."""
    (tmp_path / "own.py").write_text(TIED)
    own = f"{tmp_path / 'own.py'}:OWN"
    for checkpoint_format in ("dcp", "safetensors"):
        train(spec(own, layout, seed=3, steps=2, save=tmp_path, checkpoint_format=checkpoint_format))
    clean, struck = tmp_path / "step-000002.dcp", tmp_path / "struck"
    expected = load_file(tmp_path / "step-000002.safetensors")
    expected["model.b.weight"] = expected["model.a.weight"].clone()
    assert same(loaded(clean, expected), expected)
    command = ["inject", clean, "-o", struck, "--layer", "b.weight", "--bits", "30", "--count", "3", "--seed", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*map(str, command)])
    assert not ended.value.code
    altered = loaded(struck, expected)
    assert torch.equal(altered["model.b.weight"], altered["model.a.weight"])
    assert (altered["model.a.weight"] != expected["model.a.weight"]).sum() == 3
    save_file(altered, tmp_path / "by-hand.safetensors")
    for onward in ("single", "fsdp:2"):
        runs = [
            train(spec(own, onward, steps=4, resume=path)) for path in (struck, tmp_path / "by-hand.safetensors", clean)
        ]
        assert runs[0].resume_digest == runs[1].resume_digest
        assert runs[0].state_digest != runs[2].state_digest


@pytest.mark.parametrize("layout", ["single", "fsdp:2"])
def test_what_can_not_be_written_is_one_line_and_leaves_what_was_there(tmp_path: Path, layout: str) -> None:
    run = tmp_path / "run"
    train(spec("digits-cnn", layout, seed=1, steps=1, save=run, checkpoint_format="dcp"))
    there = sorted(tmp_path.rglob("*"))
    onward = spec("digits-cnn", layout, steps=2, resume=run, save=run, checkpoint_format="dcp")
    body = functools.partial(train_with_small_files, onward, 40_000)
    said = r"step-000002\.dcp can't be written: (rank 0: )?File too large$"
    with pytest.raises(OutputError, match=said), nothing_unfinished(run):
        run_ranks(body, onward.parallel.ranks, lambda event: None)
    assert sorted(tmp_path.rglob("*")) == there


def test_a_rank_that_dies_while_it_saves_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    arguments = [
        sys.executable, "-m", "flipper", "train", "digits-cnn", "--seed", "1", "--parallel", "fsdp:2", "--save", "run",
        "--checkpoint-format", "dcp", "-q", "--steps", "100000", "--save-every", "1",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = tmp_path / "run"
    with subprocess.Popen(
        arguments, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert wait_until(lambda: (run / "step-000003.dcp").exists() and any(run.glob(".flipper-*")))
            os.kill(ranks_below(process.pid)[1], signal.SIGKILL)
            error = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert error == "flipper: error: rank 1 of 2 died (killed by SIGKILL)\n"
    assert list(run.glob(".flipper-*")) == []
    for path in run.glob("step-*"):
        state = {"progress.step": torch.tensor(0)}
        dcp.load(state, checkpoint_id=path)
        assert f"step-{int(state['progress.step']):06d}.dcp" == path.name
    assert (run / (run / "last").read_text().strip() / ".metadata").exists()
