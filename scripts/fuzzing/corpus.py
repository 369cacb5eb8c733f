"""The small, healthy checkpoints that are damaged: `corpus.py FOLDER FORMAT...` writes FOLDER/FORMAT/*."""

import argparse
import json
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np


def state() -> dict[str, Any]:
    """Nested, tied, viewed, of several dtypes, with an optimizer and things that are no tensors."""
    import torch

    shared, base = torch.randn(4, 3), torch.randn(12)
    return {
        "model": {"a.weight": shared, "b.weight": shared, "view": base[2:8].view(2, 3).t(), "half": base[8:].half()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4, 3)}}, "param_groups": [{}]},
        "small": [torch.ones(2, dtype=torch.int8), torch.tensor(True), torch.ones(3, dtype=torch.float8_e5m2)],
        "args": argparse.Namespace(lr=0.1, layers=(1, 2)),
        "score": np.float64(0.5),
        "epoch": 7,
    }


def pytorch(folder: Path, zipped: bool = True) -> None:
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    values = {"state": state(), "module": network, "flat": network.state_dict(), "bare": torch.randn(3)}
    sparse = {
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8),
    }
    for name, value in {**values, "odd": sparse}.items():
        torch.save(value, folder / name, _use_new_zipfile_serialization=zipped)
    if zipped:
        torch.jit.script(network).save(folder / "script")
        with (
            zipfile.ZipFile(folder / "state") as old,
            zipfile.ZipFile(folder / "deflated", "w", zipfile.ZIP_DEFLATED) as new,
        ):
            for entry in old.namelist():
                new.writestr(entry, old.read(entry))


def legacy(folder: Path) -> None:
    pytorch(folder, zipped=False)


def dcp(folder: Path) -> None:
    import torch
    from torch.distributed import checkpoint

    for name, value in {
        "nested": {k: v for k, v in state().items() if k != "args"},
        "flat": {"w": torch.ones(3, 2)},
    }.items():
        checkpoint.save(value, checkpoint_id=folder / name)


def safetensors(folder: Path) -> None:
    kinds = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I64": 8, "BOOL": 1, "C64": 8}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "b.weight": "a.weight"}}
    at = 0
    for number, (kind, width) in enumerate(kinds.items()):
        header[f"part{number}.weight"] = {
            "dtype": kind,
            "shape": [number, 3],
            "data_offsets": [at, at + 3 * width * number],
        }
        at += 3 * width * number
    header["packed"] = {"dtype": "F4", "shape": [2, 4], "data_offsets": [at, at + 4]}
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + bytes(at + 4)
    (folder / "kinds").write_bytes(whole)
    (folder / "sharded").mkdir()
    for shard, name in (("x-1.safetensors", "a"), ("x-2.safetensors", "b")):
        text = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        (folder / "sharded" / shard).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))


def hdf5(folder: Path) -> None:
    import h5py

    for libver in ("earliest", "latest"):
        with h5py.File(folder / f"many-{libver}", "w", libver=libver) as file:
            fill_hdf5(file)
        with h5py.File(folder / f"few-{libver}", "w", libver=libver) as file:
            file["a/kernel"] = np.ones((2, 3), np.float32)
    with h5py.File(folder / "userblock", "w", userblock_size=512) as file:
        file["a"] = np.ones(3)


def fill_hdf5(file: Any) -> None:
    """One dataset of each kind of storage and type."""
    import h5py

    ones = np.ones((4, 6), np.float32)
    file["layers/dense/vars/0"] = ones
    file.attrs["layer_names"] = np.array([b"layers"])
    file["layers"].attrs["weight_names"] = np.array([b"dense/vars/0"])
    file["layers/hard"] = file["layers/dense/vars/0"]
    file["soft"], file["external"] = h5py.SoftLink("/layers/hard"), h5py.ExternalLink("other.h5", "/x")
    file.create_dataset("chunked", data=ones, chunks=(2, 4))
    file.create_dataset("filtered", data=ones, chunks=(2, 4), compression="gzip", shuffle=True, fletcher32=True)
    compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    compact.set_layout(h5py.h5d.COMPACT)
    h5py.h5d.create(file.id, b"compact", h5py.h5t.IEEE_F32BE, h5py.h5s.create_simple((2,)), compact)
    file["bool"], file["complex"] = np.array([True, False]), np.ones(2, np.complex64)
    file["text"], file["scalar"] = "words", np.float64(1)
    file["opaque"] = np.zeros(3, "V2")
    file["empty"] = h5py.Empty("f")
    file["reference"] = file["chunked"].ref


def keras(folder: Path) -> None:
    import h5py

    weights = folder / "weights"
    with h5py.File(weights, "w") as file:
        file["layers/dense/vars/0"], file["optimizer/vars/0"] = np.ones((2, 3), np.float32), np.zeros(2)
        file.create_dataset("layers/dense/vars/1", data=np.ones(8, np.float32), chunks=(4,), compression="gzip")
    layer = {"module": "keras.layers", "class_name": "Dense", "config": {"name": "first"}}
    config = {"class_name": "Sequential", "config": {"name": "s", "layers": [layer]}}
    with zipfile.ZipFile(folder / "model", "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", json.dumps(config))
        archive.write(weights, "model.weights.h5")
    weights.unlink()


MAKERS = {"pytorch": pytorch, "legacy": legacy, "hdf5": hdf5, "safetensors": safetensors, "dcp": dcp, "keras": keras}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for wanted in sys.argv[2:]:
        target = Path(sys.argv[1], wanted)
        target.mkdir()
        MAKERS[wanted](target)
