"""Canonical states as files: one function to write each format, one that reads all of them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from flipper.checkpoints.output import atomic_output
from flipper.errors import CheckpointError, OutputError, UsageError
from flipper.training.canonical import State
from flipper.training.launch import one_line

HDF5_MAGIC: Final = b"\x89HDF\r\n\x1a\n"
HDF5_MARK: Final = ("flipper_layout", "flipper-state/1")  # says: a path is a name, with / for its dots


def save(state: State, path: Path, checkpoint_format: str) -> None:
    """Write a canonical state, whole or not at all, and make `last`, beside it, hold its name.

    Raises OutputError when the file exists or can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"can't make the folder {path.parent}: {error.strerror}") from error
    with atomic_output(path) as partial:
        _WRITERS[checkpoint_format](state, partial)
    with atomic_output(path.with_name("last"), force=True) as partial:
        partial.write_text(f"{path.name}\n", encoding="utf-8")


def load(path: Path) -> State:
    """Read a canonical state of any format, found by its content; a --save folder means its `last`.

    Values are taken as they are, NaN and huge ones too. Raises CheckpointError.
    """
    if path.is_dir():
        path = _newest(path)
    try:
        with path.open("rb") as file:
            head = file.read(16)
        if head.startswith(HDF5_MAGIC):
            return _read_hdf5(path)
        if head.startswith((b"PK\x03\x04", b"\x80")):
            return _read_pytorch(path)
        if head[8:9] == b"{":
            return _read_safetensors(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist") from error
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError("pickle", f"{path}: {one_line(error)}") from error
    except (
        Exception
    ) as error:  # the readers' own errors are of many kinds: RuntimeError, OSError, KeyError ...
        raise CheckpointError("unreadable", f"{path}: {one_line(error)}") from error
    raise CheckpointError("foreign", f"{path} is neither safetensors, PyTorch nor HDF5")


def _newest(folder: Path) -> Path:
    """The checkpoint that a --save folder's `last` names."""
    try:
        name = (folder / "last").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder} is no --save folder: it has no readable file `last`") from error
    return folder / Path(name).name


def nest(state: State) -> dict[str, Any]:
    """The state as nested dicts: "model" is a state_dict; the rest is split at every dot but the name's own."""
    tree: dict[str, Any] = {}
    for name, tensor in state.items():
        top, _, rest = name.partition(".")
        keys = [top, *rest.rsplit(".", 1)] if top == "optimizer" else [top, rest]
        branch = tree
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
        branch[keys[-1]] = tensor
    return tree


def flatten(tree: object, path: Path, prefix: str = "") -> State:
    """Undo `nest`, whatever the depth; CheckpointError when something else than tensors is in it."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    if not isinstance(tree, dict):
        raise CheckpointError(
            "foreign", f"{path}: {prefix or 'the root'} is a {type(tree).__name__}, not a tensor"
        )
    state: State = {}
    for key, value in tree.items():
        state.update(flatten(value, path, f"{prefix}.{key}" if prefix else str(key)))
    return state


def _write_pytorch(state: State, path: Path) -> None:
    buffer = io.BytesIO()  # torch.save to a path puts the file's name into the archive
    torch.save(nest(state), buffer)
    path.write_bytes(buffer.getvalue())


def _read_pytorch(path: Path) -> State:
    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"
    return flatten(torch.load(path, map_location="cpu", weights_only=True, mmap=mapped), path)


def _write_safetensors(state: State, path: Path) -> None:
    from safetensors.torch import save

    path.write_bytes(save(state, metadata={"format": "pt"}))  # save_file would make it readable by its owner only


def _read_safetensors(path: Path) -> State:
    from safetensors.torch import load_file

    return dict(load_file(path))


def _write_hdf5(state: State, path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs[HDF5_MARK[0]] = HDF5_MARK[1]
        for name, tensor in state.items():
            file.create_dataset(name.replace(".", "/"), data=tensor.numpy())


def _read_hdf5(path: Path) -> State:
    import h5py

    state: State = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            state[name.replace("/", ".")] = torch.from_numpy(numpy.array(item[()]))

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return state


_WRITERS: Final[dict[str, Callable[[State, Path], None]]] = {
    "safetensors": _write_safetensors,
    "pytorch": _write_pytorch,
    "hdf5": _write_hdf5,
}
