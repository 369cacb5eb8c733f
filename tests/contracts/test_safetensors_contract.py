"""safetensors files keep the contract, in every dtype of the format."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
from battery import FormatContract
from oracles import SAFETENSORS, Array, read_safetensors, torch_array, width_of
from safetensors import safe_open
from safetensors.torch import save_file, save_model

SAMPLES = Path(__file__).parent.parent.parent / "sample_checkpoints"


def random_bytes(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).tobytes()


class TestSafetensorsOfTorch(FormatContract):
    """Written and read by the safetensors library."""

    format = "safetensors"

    def make(self, folder: Path) -> Path:
        torch.manual_seed(0)
        tensors = {
            "layer.weight": torch.randn(7, 9),
            "layer.bias": torch.randn(9).bfloat16(),
            "half": torch.randn(3, 4, 5).half(),
            "double": torch.randn(11).double(),
            "eight": torch.randn(13).to(torch.float8_e4m3fn),
            "wide": torch.randn(13).to(torch.float8_e5m2),
            "spectrum": torch.randn(6, dtype=torch.complex64),
            "steps": torch.arange(5),
            "mask": torch.tensor([True, False, True]),
            "bytes": torch.arange(10, dtype=torch.uint8),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3),
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder / "model.safetensors"

    def read(self, path: Path) -> dict[str, Array]:
        with safe_open(path, "pt") as file:
            return {name: torch_array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 it is no dict


class TestSafetensorsOfEveryDtype(FormatContract):
    """Written by struct, those that the library can't write among them: 4 and 6 bits an element."""

    format = "safetensors"

    def make(self, folder: Path) -> Path:
        header, data = {}, b""
        for seed, (code, dtype) in enumerate(SAFETENSORS.items()):
            count = 16 * (2 if dtype.startswith("complex") else 1) * width_of(dtype) // 8
            content = random_bytes(count, seed) if dtype != "bool" else bytes([0, 1] * 8)
            header[f"t.{code}"] = {"dtype": code, "shape": [2, 8], "data_offsets": [len(data), len(data) + count]}
            data += content
        text = json.dumps(header).encode().ljust(4096)
        (folder / "all.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        return folder / "all.safetensors"

    def read(self, path: Path) -> dict[str, Array]:
        return read_safetensors(path)


class TestSafetensorsWithTies(FormatContract):
    """save_model's: one of two tied names is stored, the metadata names the other."""

    format = "safetensors"

    def make(self, folder: Path) -> Path:
        torch.manual_seed(0)
        model = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(5, 5), "b": torch.nn.Linear(5, 5), "c": torch.nn.Linear(5, 2)}
        )
        model["b"].weight = model["a"].weight
        save_model(model, str(folder / "tied.safetensors"))
        return folder / "tied.safetensors"

    def read(self, path: Path) -> dict[str, Array]:
        return read_safetensors(path)


class TestSampleSafetensors(TestSafetensorsOfEveryDtype):
    def make(self, folder: Path) -> Path:
        return SAMPLES / "digits-mlp.safetensors"
