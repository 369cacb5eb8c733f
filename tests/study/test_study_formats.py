"""Formats: what is saved comes back to the bit on every rank, and is what the format's own library reads."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from study_bodies import round_trip, tensors

from flipper.study.formats import FORMATS
from flipper.training.launch import run_ranks
from flipper.training.spec import Event

QUICK = tuple(name for name in FORMATS if name != "keras")


@pytest.fixture(scope="module", params=[1, 3])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event], int]:
    folder = tmp_path_factory.mktemp("formats")
    events: list[Event] = []
    run_ranks(functools.partial(round_trip, QUICK, folder), request.param, events.append)
    return folder, events, request.param


def test_every_rank_gets_back_the_bits_that_it_had(saved: tuple[Path, list[Event], int]) -> None:
    _, events, ranks = saved
    expected = {(name, "sync", rank) for name in QUICK for rank in range(ranks)}
    expected |= {("dcp", "async", rank) for rank in range(ranks)}
    assert {(event["format"], event["mode"], event["rank"]) for event in events} == expected
    assert [event for event in events if event["wrong"]] == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_libraries_read_the_same(saved: tuple[Path, list[Event], int]) -> None:
    folder, _, ranks = saved
    state = tensors()
    plain = {name: tensor.numpy() for name, tensor in state.items() if tensor.dtype != torch.bfloat16}
    assert torch.load(folder / "pytorch-sync").keys() == state.keys()
    assert torch.equal(load_file(folder / "safetensors-sync")["model.a.bias"], state["model.a.bias"])
    for name in ("npz", "npz-deflate"):
        with np.load(folder / f"{name}-sync") as file:
            assert all(file[each].tobytes() == array.tobytes() for each, array in plain.items())
    for name in ("hdf5", "hdf5-chunked", "hdf5-gzip", "hdf5-chainer"):
        with h5py.File(folder / f"{name}-sync") as file:
            for each, array in plain.items():
                place = each.replace(".", "/") if name == "hdf5-chainer" else each
                assert (file[place].dtype, file[place][()].tobytes()) == (array.dtype, array.tobytes())
            weight = file["model/a/weight" if name == "hdf5-chainer" else "model.a.weight"]
            assert weight.compression == ("gzip" if name in ("hdf5-gzip", "hdf5-chainer") else None)
            assert (weight.chunks is None) == (name == "hdf5")
    for mode in ("sync", "async"):
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items() if tensor.numel()}
        dcp.load(into, checkpoint_id=folder / f"dcp-{mode}")
        assert all(torch.equal(into[name], state[name]) for name in into if name != "half")
        assert len(list((folder / f"dcp-{mode}").glob("*.distcp"))) == ranks
    shards = [load_file(path) for path in sorted((folder / "safetensors-sharded-sync").glob("*.safetensors"))]
    assert len(shards) == ranks
    parts = torch.cat([shard["model.a.weight"] for shard in shards if "model.a.weight" in shard])
    assert torch.equal(parts, state["model.a.weight"])


def test_keras_gives_back_the_bits_too(tmp_path: Path) -> None:
    if find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    events: list[Event] = []
    run_ranks(functools.partial(round_trip, ("keras",), tmp_path), 1, events.append)
    assert [(event["format"], event["wrong"]) for event in events] == [("keras", [])]
    with h5py.File(tmp_path / "keras-sync") as file:
        arrays: list[np.ndarray] = []
        file.visititems(lambda _, item: arrays.append(item[()]) if isinstance(item, h5py.Dataset) else None)
    assert len(arrays) == len(tensors())
    assert any(np.array_equal(array, tensors()["model.a.weight"]) for array in arrays)
