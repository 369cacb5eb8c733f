"""Directories keep the contract: torch.distributed.checkpoint, and Hugging Face's shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from battery import FormatContract
from oracles import Array, read_safetensors, read_torch, torch_array
from safetensors.torch import save_file

SAMPLES = Path(__file__).parent.parent.parent / "sample_checkpoints"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "layer.weight": torch.randn(9, 7),
        "layer.bias": torch.randn(7).bfloat16(),
        "head.weight": torch.randn(5, 9).half(),
        "norm.steps": torch.arange(6),
        "scalar": torch.tensor(0.5),
        "eight": torch.randn(16).to(torch.float8_e4m3fn),
    }


class TestDcp(FormatContract):
    """What torch.distributed.checkpoint.save writes; read by its load."""

    format = "dcp"
    checksums = True

    def template(self) -> dict[str, torch.Tensor]:
        return state()

    def make(self, folder: Path) -> Path:
        dcp.save(state(), checkpoint_id=folder / "dcp", no_dist=True)
        return folder / "dcp"

    def read(self, path: Path) -> dict[str, Array]:
        loaded = {name: torch.zeros_like(tensor) for name, tensor in self.template().items()}
        dcp.load(loaded, checkpoint_id=path, no_dist=True)
        return {name: torch_array(tensor) for name, tensor in loaded.items()}


class TestSampleDcp(TestDcp):
    """Two ranks saved their rows of every tensor; loaded whole."""

    def make(self, folder: Path) -> Path:
        return SAMPLES / "digits-cnn-dcp"

    def read(self, path: Path) -> dict[str, Array]:
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        loaded = {
            name: torch.zeros(described.size, dtype=described.properties.dtype)
            for name, described in metadata.items() if hasattr(described, "properties")
        }  # fmt: skip
        dcp.load(loaded, checkpoint_id=path, no_dist=True)
        return {name: torch_array(tensor) for name, tensor in loaded.items()}


class TestShardedSafetensors(FormatContract):
    format = "sharded"

    def make(self, folder: Path) -> Path:
        path = folder / "model"
        path.mkdir()
        names = list(state())
        owners = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
        self.write(path, owners)
        return path

    def write(self, path: Path, owners: dict[str, str]) -> None:
        for file in set(owners.values()):
            save_file({name: tensor for name, tensor in state().items() if owners[name] == file}, path / file)
        index = {"metadata": {}, "weight_map": owners}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        (path / "config.json").write_text("{}")

    def read(self, path: Path) -> dict[str, Array]:
        return {name: array for file in path.glob("*.safetensors") for name, array in read_safetensors(file).items()}

    def test_only_struck_shards_are_copied_anew(self, source: Path) -> None:
        """The others share their bytes with the source's, small files do not."""
        from flipper.checkpoints import open_checkpoint
        from flipper.faults.draw import draw
        from flipper.faults.model import FaultModel

        with open_checkpoint(source) as checkpoint:
            plan = draw(checkpoint, FaultModel(layers=["layer.weight"], count=3), 1)
            struck = checkpoint.tensor("layer.weight").place.file
        out, _ = self.altered(source, plan)
        for file in source.iterdir():
            linked = (out / file.name).stat().st_ino == file.stat().st_ino
            assert not (linked and (file.name == struck or file.suffix == ".json"))


class TestShardedBin(TestShardedSafetensors):
    checksums = True

    def write(self, path: Path, owners: dict[str, str]) -> None:
        owners = {name: file.replace("model-", "pytorch_model-").replace("safetensors", "bin")
                  for name, file in owners.items()}  # fmt: skip
        for file in set(owners.values()):
            torch.save({name: tensor for name, tensor in state().items() if owners[name] == file}, path / file)
        index = {"metadata": {}, "weight_map": owners}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))

    def read(self, path: Path) -> dict[str, Array]:
        return {name: array for file in path.glob("*.bin") for name, array in read_torch(file).items()}


class TestSampleSharded(TestShardedSafetensors):
    def make(self, folder: Path) -> Path:
        return SAMPLES / "digits-cnn-sharded"

    def test_only_struck_shards_are_copied_anew(self) -> None:
        """Held above."""
