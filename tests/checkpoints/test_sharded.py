"""Hugging Face directories: shards named by an index, and directories with one checkpoint file."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_makers import bits_of, deflated

from flipper.checkpoints import open_checkpoint
from flipper.errors import CheckpointError

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2).half(), "b.weight": torch.full((4,), 3)}
SHARDS = {"a.weight": 1, "a.bias": 1, "b.weight": 2}


def sharded(folder: Path, kind: str) -> Path:
    """STATE over two shards, "safetensors" or "bin"."""
    stem = "model" if kind == "safetensors" else "pytorch_model"
    owners = {name: f"{stem}-0000{number}-of-00002.{kind}" for name, number in SHARDS.items()}
    for file in set(owners.values()):
        part = {name: tensor for name, tensor in STATE.items() if owners[name] == file}
        if kind == "safetensors":
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": owners}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def assert_state(checkpoint) -> None:
    assert {tensor.name for tensor in checkpoint.tensors} == set(STATE)
    for name, tensor in STATE.items():
        found = checkpoint.tensor(name)
        assert np.array_equal(checkpoint.read_bits(found, np.arange(found.elements)), bits_of(tensor)), name


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_tensors_of_all_shards_are_one_checkpoint(tmp_path, kind):
    checkpoint = open_checkpoint(sharded(tmp_path, kind))
    assert checkpoint.format == "sharded"
    assert checkpoint.is_directory
    assert len(checkpoint.sources) == 2
    assert_state(checkpoint)
    assert list(checkpoint.problems()) == []
    assert checkpoint.tensor("b.weight").place.file.endswith(f"-00002-of-00002.{kind}")


@pytest.mark.parametrize(
    "name", ["diffusion_pytorch_model.safetensors.index.json", "model.safetensors.index.fp16.json"]
)
def test_an_index_may_have_any_name_that_says_so(tmp_path, name):
    """Libraries have names of their own, and some say the variant."""
    sharded(tmp_path, "safetensors")
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / name)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.sources) == 2
    assert_state(checkpoint)


def test_a_strike_changes_one_shard_and_its_checksums(tmp_path):
    folder = sharded(tmp_path, "bin")
    checkpoint = open_checkpoint(folder)
    place = checkpoint.tensor("a.weight").place
    path = folder / place.file
    data = bytearray(path.read_bytes())
    offsets, masks = np.array([place.offset + 7]), np.array([0x80], np.uint8)
    where, repair = checkpoint.checksum_masks(place.file, offsets, masks)
    for offset, mask in [(place.offset + 7, 0x80), *zip(where.tolist(), repair.tolist(), strict=True)]:
        data[offset] ^= mask
    path.write_bytes(data)
    assert torch.load(path)["a.weight"].reshape(-1).tolist() == [0, -1, 2, 3, 4, 5]
    assert zipfile.ZipFile(path).testzip() is None


def test_deflated_shards_are_read_and_rewritten(tmp_path):
    folder = sharded(tmp_path, "bin")
    path = folder / "pytorch_model-00001-of-00002.bin"
    deflated(path, folder / "again").replace(path)
    checkpoint = open_checkpoint(folder)
    assert_state(checkpoint)
    tensor = checkpoint.tensor("a.weight")
    checkpoint.rewrite(path, path.name, [(tensor, np.array([1]), np.array([1 << 31], np.uint64))])
    assert torch.load(path)["a.weight"].reshape(-1).tolist() == [0, -1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "weights.pt"])
def test_a_directory_with_one_checkpoint_file_is_that_checkpoint(tmp_path, name):
    if name.endswith("safetensors"):
        save_file(STATE, tmp_path / name)
    else:
        torch.save(STATE, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert_state(checkpoint)
    assert list(checkpoint.sources) == [name]


def test_several_candidates_are_named(tmp_path):
    for name in ("one.pt", "two.pt"):
        torch.save(STATE, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"one\.pt, two\.pt") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "foreign"


def test_a_directory_without_checkpoints_is_foreign(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "foreign"


def test_a_missing_shard_and_a_missing_tensor_are_told(tmp_path):
    folder = sharded(tmp_path, "safetensors")
    second = folder / "model-00002-of-00002.safetensors"
    save_file({"other": load_file(second)["b.weight"]}, second)
    with pytest.raises(CheckpointError, match=r"b\.weight") as caught:
        open_checkpoint(folder)
    assert caught.value.reason == "missing-shard"
    second.unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002") as caught:
        open_checkpoint(folder)
    assert caught.value.reason == "missing-shard"


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{", "[" * 100_000, '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x"}}',
     '{"weight_map": {"a": "/etc/passwd"}}', "\xff", '{"weight_map": {"a": "x\\u0000y"}}'],
)  # fmt: skip
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "header"
    assert "\n" not in str(caught.value)


def test_ties_recorded_in_a_shard_stay(tmp_path):
    weight = torch.arange(4.0)
    save_file({"a": weight}, tmp_path / "model.safetensors", metadata={"b": "a"})
    assert open_checkpoint(tmp_path).tensor("b").names == ("a", "b")
