"""Files in flipper's own HDF5 layout, here made by hand with h5py: dotted names, stated dtypes, the recorded tree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from flipper.checkpoints.formats import open_checkpoint
from flipper.checkpoints.tree import Leaf
from flipper.errors import CheckpointError


def write(path: Path, fill: Callable[[Any], object], tree: object = None) -> Path:
    """A file with flipper's mark."""
    with h5py.File(path, "w") as file:
        file.attrs["flipper_layout"] = "flipper-state/1"
        if tree is not None:
            file.create_dataset("flipper_tree", data=np.bytes_(json.dumps(tree).encode()))
        fill(file)
    return path


def states(file: Any, name: str, data: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...] | None = None) -> None:
    """A dataset whose attributes say more than its type."""
    file[name] = data
    file[name].attrs["flipper_dtype"] = dtype
    if shape is not None:
        file[name].attrs["flipper_shape"] = np.array(shape, np.int64)


def test_names_are_joined_by_dots_and_escapes_undone(tmp_path: Path) -> None:
    """So that one model has the same names in every format; the structure record is no tensor."""

    def fill(file: Any) -> None:
        file["model/conv1.weight"] = np.ones(3, "f4")
        file["model/a%2Fb"] = np.ones(3, "f4")
        file["model/tied"] = file["model/conv1.weight"]

    tree = {"dict": {"model": {"dict": {"conv1.weight": {"parameter": "model.conv1.weight"}, "lr": 0.5}}}}
    with open_checkpoint(write(tmp_path / "a.h5", fill, tree)) as checkpoint:
        assert {tensor.name: tensor.aliases for tensor in checkpoint.tensors} == {
            "model.a/b": (),
            "model.conv1.weight": ("model.tied",),
        }
        assert checkpoint.tree() == {"model": {"conv1.weight": Leaf("model.conv1.weight", parameter=True), "lr": 0.5}}


def test_without_a_structure_record_the_tree_is_flat(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path / "a.h5", lambda f: f.__setitem__("a/b", np.ones(2)))) as checkpoint:
        assert checkpoint.tree() == {"a.b": Leaf("a.b")}


def test_a_dataset_may_state_a_dtype_that_hdf5_cannot_spell(tmp_path: Path) -> None:
    def fill(file: Any) -> None:
        states(file, "scale", np.array([127, 128], np.uint8), "float8_e8m0fnu")
        states(file, "packed", np.array([0x21, 0x43], np.uint8), "float4_e2m1fn", (2, 2))

    with open_checkpoint(write(tmp_path / "a.h5", fill)) as checkpoint:
        scale, packed = checkpoint.tensor("scale"), checkpoint.tensor("packed")
        assert (scale.dtype, scale.shape) == ("float8_e8m0fnu", (2,))
        assert (packed.dtype, packed.shape) == ("float4_e2m1fn", (2, 2))
        assert checkpoint.read_bits(packed, np.arange(4)).tolist() == [1, 2, 3, 4]


WRONG: list[Callable[[Any], object]] = [
    lambda f: states(f, "x", np.zeros(4, np.uint8), "float4_e2m1fn", (2, 2)),
    lambda f: states(f, "x", np.zeros(4, np.uint8), "float4_e2m1fn", (-2, -4)),
    lambda f: states(f, "x", np.zeros(4, np.uint8), "float4_e2m1fn"),
    lambda f: states(f, "x", np.zeros(4, np.uint8), "float32"),
    lambda f: states(f, "x", np.zeros(4, np.uint8), "no such dtype"),
]


@pytest.mark.parametrize("fill", WRONG)
def test_a_stated_dtype_that_does_not_fit_is_a_broken_header(fill: Callable[[Any], object], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(write(tmp_path / "a.h5", fill))
    assert error.value.reason == "header"


def test_the_newest_layout_of_hdf5_carries_the_mark_too(tmp_path: Path) -> None:
    """As of a file that h5repack has written anew."""
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.attrs["flipper_layout"] = "flipper-state/1"
        states(file, "m/scale", np.array([127, 128], np.uint8), "float8_e8m0fnu")
    with open_checkpoint(tmp_path / "a.h5") as checkpoint:
        assert [(tensor.name, tensor.dtype) for tensor in checkpoint.tensors] == [("m.scale", "float8_e8m0fnu")]


def test_a_stated_dtype_does_not_make_numbers_of_what_are_none(tmp_path: Path) -> None:
    """A string of variable length is 16 bytes that lead into a heap; striking these would break the file."""

    def fill(file: Any) -> None:
        file["x"] = ["some", "text"]
        file["x"].attrs["flipper_dtype"] = "complex128"

    with open_checkpoint(write(tmp_path / "a.h5", fill)) as checkpoint:
        assert checkpoint.tensors[0].place.reason == "vlen string elements are no numbers"


def test_a_damaged_structure_record_is_a_broken_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", lambda f: f.__setitem__("a", np.ones(2)), {"dict": 3})
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError) as error:
        checkpoint.tree()
    assert error.value.reason == "header"


def test_the_mark_matters_in_the_root_only_and_as_text(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a/b"] = np.ones(2)
        file.attrs["flipper_layout"] = 7
        file["a"].attrs["flipper_layout"] = "flipper-state/1"
    with open_checkpoint(tmp_path / "a.h5") as checkpoint:
        assert checkpoint.tensors[0].name == "a/b"
