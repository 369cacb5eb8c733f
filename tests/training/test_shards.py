"""Where elements of whole tensors lie: shards against torch's own full tensors, gathering, the memory of loading."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import rank_bodies
import torch
from safetensors.numpy import load_file, save_file
from series import LAYOUTS, spec, train_all

from flipper.training.launch import run_ranks
from flipper.training.ranks import Body
from flipper.training.spec import Event, Parallel

BIG = """
import torch
from torch import nn
from flipper.training import Data, Recipe, accuracy

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

def model():
    return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(2)))

BIG = Recipe("big", model, model, nn.functional.mse_loss, accuracy, sgd, 4)  # its data and loss are never used
"""


def events(body: Body, layout: str) -> list[Event]:
    found: list[Event] = []
    run_ranks(body, Parallel.parse(layout).ranks, found.append, timeout=60)
    return sorted(found, key=lambda event: event["rank"])


@pytest.mark.parametrize("recipe", ["digits-mlp", "digits-cnn", "digits-bf16"])
@pytest.mark.parametrize("layout", ["fsdp:2", "fsdp:3", "tensor:2", "fsdp:2+tensor:2"])
def test_shards_hold_what_full_tensors_hold_in_their_boxes_and_boxes_tile_the_whole(recipe: str, layout: str) -> None:
    """Parameters and optimizer, of rows that the ranks don't divide, and split by both axes of a grid."""
    ranks = events(functools.partial(rank_bodies.compare_with_full_tensors, recipe, Parallel.parse(layout)), layout)
    for rank in ranks:
        assert (rank["wrong"], rank["missing"]) == ([], []), rank["rank"]
        assert rank["split"]
    for name, shape in ranks[0]["shapes"].items():
        covered = numpy.zeros(shape, int)
        for box in {tuple(rank["boxes"][name]) for rank in ranks if math.prod(b - a for a, b in rank["boxes"][name])}:
            covered[tuple(slice(*each) for each in box)] += 1
        assert (covered == 1).all(), name


@pytest.fixture(scope="module")
def scrambled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of mnist5k-cnn, whose parameters, buffers and moments are all unlike each other."""
    folder = tmp_path_factory.mktemp("scrambled")
    (run,) = train_all([spec("mnist5k-cnn", steps=1, save=folder)])
    generator = numpy.random.default_rng(1)
    arrays = {
        name: generator.normal(size=array.shape).astype(array.dtype) if array.dtype.kind == "f" else array
        for name, array in load_file(run.files[0]).items()
    }
    save_file(arrays, folder / "scrambled.safetensors")
    return folder / "scrambled.safetensors"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_loaded_is_gathered_to_the_bit(scrambled: Path, layout: str) -> None:
    events(
        functools.partial(rank_bodies.gather_what_was_loaded, "mnist5k-cnn", Parallel.parse(layout), scrambled), layout
    )
    loaded, gathered = load_file(scrambled), load_file(scrambled.with_name("gathered.safetensors"))
    wanted = {name for name in loaded if name.startswith(("model.", "optimizer.", "scheduler."))}
    assert set(gathered) == wanted
    for name in wanted:
        assert (gathered[name].dtype, gathered[name].shape) == (loaded[name].dtype, loaded[name].shape)
        assert gathered[name].tobytes() == loaded[name].tobytes(), name


@pytest.mark.parametrize("checkpoint_format", ["safetensors", "pytorch"])
@pytest.mark.parametrize(("layout", "share"), [("single", 1.0), ("fsdp:2", 0.5)])
def test_loading_takes_no_more_memory_than_the_optimizers_part_of_a_rank(
    tmp_path: Path, layout: str, share: float, checkpoint_format: str
) -> None:
    """128 MiB of parameters, which are there before, and as much of momentum, in a fresh process."""
    (tmp_path / "big.py").write_text(BIG)
    names = ("0.weight", "1.weight")
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    for name in names:
        state["model"][name] = torch.ones(4096, 4096)
        state["optimizer"][name] = {"momentum_buffer": torch.ones(4096, 4096)}
    path = tmp_path / "state"
    if checkpoint_format == "pytorch":
        torch.save(state, path)
    else:
        flat = {f"model.{name}": state["model"][name].numpy() for name in names}
        flat |= {f"optimizer.{name}.momentum_buffer": flat[f"model.{name}"] for name in names}
        save_file(flat, path)
    body = functools.partial(rank_bodies.memory_of_loading, f"{tmp_path}/big.py:BIG", Parallel.parse(layout), path)
    momentum = 128 * 2**20 * share
    for rank in events(body, layout):
        assert 0.9 * momentum < rank["now"]
        assert rank["peak"] < 1.3 * momentum
    path.unlink()
