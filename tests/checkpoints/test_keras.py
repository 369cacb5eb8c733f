"""Keras' files, as Keras itself writes and loads them: .h5, .weights.h5 and .keras."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_tools import contents, strike, xored

from flipper.checkpoints.formats import open_checkpoint
from flipper.checkpoints.keras_names import names_in_config
from flipper.errors import CheckpointError

if find_spec("keras") is None or find_spec("torch") is None:
    pytest.skip("Keras with its torch backend is not installed", allow_module_level=True)

SAVE = """
import keras, sys, warnings
from keras import layers
inner = keras.Sequential([keras.Input((16,)), layers.Dense(3, name="deep")], name="block")
start = keras.Input((4, 4, 1))
flow = layers.Conv2D(2, 3, padding="same", name="stem")(start)
flow = layers.GlobalAveragePooling2D()(layers.BatchNormalization()(flow))
flow = inner(layers.Dense(16, name="fc")(flow))
model = keras.Model(start, layers.Dense(2, name="dense")(flow))
model.compile("adam", "mse")
model.optimizer.build(model.trainable_variables)
for name in ("m.keras", "m.weights.h5", "m.h5"):
    (model.save_weights if "weights" in name else model.save)(f"{sys.argv[1]}/{name}")
"""
LOAD = """
import keras, numpy as np, sys
clean, struck = (keras.models.load_model(path) for path in sys.argv[1:3])
for a, b in zip(clean.weights, struck.weights, strict=True):
    a, b = np.array(a).view(np.uint32).ravel(), np.array(b).view(np.uint32).ravel()
    for index in np.flatnonzero(a != b):
        print(len(a), index, a[index] ^ b[index])
"""


def run(script: str, *arguments: object) -> str:
    """Run a script that uses Keras in a process of its own, where its warnings are none of ours."""
    environment = {**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with m.keras, m.weights.h5 and m.h5 of one model."""
    folder = tmp_path_factory.mktemp("keras")
    run(SAVE, folder)
    return folder


def weights_in(path: Path) -> dict[str, bytes]:
    """The datasets of the HDF5 file in a .keras archive."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return contents(io.BytesIO(archive.read("model.weights.h5")))


def test_a_strike_in_a_keras_archive_is_what_keras_loads(saved: Path, tmp_path: Path) -> None:
    """One element changes, all CRCs hold, the archive keeps its size."""
    before = weights_in(saved / "m.keras")
    with open_checkpoint(saved / "m.keras") as checkpoint:
        assert checkpoint.format == "keras"
        tensor = checkpoint.tensor("layers/dense/vars/0")
        expected = np.frombuffer(before[tensor.name], "<u4").astype(np.uint64)
        np.testing.assert_array_equal(next(checkpoint.blocks(tensor)), expected)
        strike(checkpoint, "layers/dense/vars/0", [17], [1 << 30], tmp_path / "b.keras")
    before["layers/dense/vars/0"] = xored(before["layers/dense/vars/0"], 4, "little", [17], [1 << 30])
    assert weights_in(tmp_path / "b.keras") == before
    assert (tmp_path / "b.keras").stat().st_size == (saved / "m.keras").stat().st_size
    assert run(LOAD, saved / "m.keras", tmp_path / "b.keras").split("\n") == [f"32 17 {1 << 30}", ""]
    with open_checkpoint(tmp_path / "b.keras") as struck:
        assert list(struck.problems()) == []


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_the_models_own_layer_names_are_aliases(name: str, saved: Path) -> None:
    """A layer called dense lies in layers/dense_1, which the note says."""
    with open_checkpoint(saved / name) as checkpoint:
        assert checkpoint.tensor("fc/vars/0").name == "layers/dense/vars/0"
        assert checkpoint.tensor("dense/vars/0").name == "layers/dense_1/vars/0"
        assert checkpoint.tensor("block/deep/vars/1").name == "layers/sequential/layers/dense/vars/1"
        (note,) = checkpoint.notes
        assert "layers/dense_1 is dense" in note
        assert checkpoint.tensor("stem/vars/0").role == "parameter"
        assert checkpoint.tensor("layers/batch_normalization/vars/3").role == "buffer"
        assert checkpoint.tensor("optimizer/vars/2").role == "optimizer"


def forget_name(_name: str, thing: Any) -> None:
    thing.attrs.pop("name", None)


def without_names(source: Path, target: Path, compression: int = zipfile.ZIP_STORED) -> None:
    """The archive as an older Keras 3 writes it: the weights don't hold the layers' names."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for entry in old.namelist():
            data = io.BytesIO(old.read(entry))
            if entry.endswith(".h5"):
                with h5py.File(data, "r+") as file:
                    file.visititems(forget_name)
            new.writestr(entry, data.getvalue())


def test_layer_names_come_from_the_configuration_when_the_weights_lack_them(saved: Path, tmp_path: Path) -> None:
    without_names(saved / "m.keras", tmp_path / "old.keras")
    with open_checkpoint(saved / "m.keras") as new, open_checkpoint(tmp_path / "old.keras") as old:
        assert [tensor.aliases for tensor in old.tensors] == [tensor.aliases for tensor in new.tensors]


def test_weights_alone_without_names_say_so(saved: Path, tmp_path: Path) -> None:
    shutil.copyfile(saved / "m.weights.h5", tmp_path / "old.h5")
    with h5py.File(tmp_path / "old.h5", "r+") as file:
        file.visititems(forget_name)
    with open_checkpoint(tmp_path / "old.h5") as checkpoint:
        assert "without their names" in checkpoint.notes[0]
        assert all(not tensor.aliases for tensor in checkpoint.tensors)


@pytest.mark.parametrize("config", [None, [], {}, {"config": 1}, {"config": {"layers": [1, {}, {"class_name": 1}]}}])
def test_a_configuration_of_another_kind_gives_no_names(config: Any) -> None:
    assert names_in_config(config) == {}


def test_a_compressed_archive_is_refused_with_the_way_out(saved: Path, tmp_path: Path) -> None:
    without_names(saved / "m.keras", tmp_path / "small.keras", zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="zip -0") as error:
        open_checkpoint(tmp_path / "small.keras")
    assert error.value.reason == "unsupported-storage"


def test_filtered_and_chunked_weights_in_an_archive(tmp_path: Path) -> None:
    """Unfiltered chunks are patched in place; filtered ones can't be, and say what to do."""
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        file.create_dataset("chunks", data=np.arange(35, dtype="f4").reshape(5, 7), chunks=(2, 3))
        file.create_dataset("packed", data=np.ones((5, 7), "f4"), compression="gzip")
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        archive.writestr("config.json", json.dumps({}))
        archive.writestr("model.weights.h5", weights.getvalue())
    before = weights_in(tmp_path / "a.keras")
    with open_checkpoint(tmp_path / "a.keras") as checkpoint:
        assert "unpack model.weights.h5" in str(checkpoint.tensor("packed").place.reason)
        strike(checkpoint, "chunks", [0, 34], [1, 1 << 31], tmp_path / "b.keras")
    before["chunks"] = xored(before["chunks"], 4, "little", [0, 34], [1, 1 << 31])
    assert weights_in(tmp_path / "b.keras") == before


def test_a_wrong_crc_is_a_problem(saved: Path, tmp_path: Path) -> None:
    data = bytearray((saved / "m.keras").read_bytes())
    with open_checkpoint(saved / "m.keras") as checkpoint:
        data[int(checkpoint.tensor("fc/vars/0").place.offset or 0)] ^= 1
    (tmp_path / "b.keras").write_bytes(data)
    with open_checkpoint(tmp_path / "b.keras") as checkpoint:
        (problem,) = checkpoint.problems()
        assert "model.weights.h5" in problem


def test_weights_that_are_no_hdf5_are_refused(saved: Path, tmp_path: Path) -> None:
    for content, reason in ((b"nothing", "foreign"), (b"\x89HDF\r\n\x1a\n" + bytes(200), "header")):
        with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
            archive.writestr("model.weights.h5", content)
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path / "a.keras")
        assert error.value.reason == reason


def test_a_keras_2_style_file_keeps_its_paths(saved: Path) -> None:
    with open_checkpoint(saved / "m.h5") as checkpoint:
        roles = {tensor.name: tensor.role for tensor in checkpoint.tensors}
        assert roles["model_weights/fc/fc/kernel"] == "parameter"
        assert roles["model_weights/batch_normalization/batch_normalization/moving_mean"] == "buffer"
        assert roles["optimizer_weights/adam/fc_kernel_momentum"] == "optimizer"
        assert checkpoint.notes == ()
