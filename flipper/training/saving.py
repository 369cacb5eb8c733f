"""Canonical states as files: written by flipper's writers, read from whatever flipper can open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flipper.checkpoints import open_checkpoint, writers
from flipper.checkpoints.output import atomic_output
from flipper.checkpoints.tree import Leaf
from flipper.checkpoints.writers import Contents, TensorData, contents_of
from flipper.errors import MismatchError, OutputError, UsageError
from flipper.training.canonical import State, dtype_name, tensor_bytes


def save(state: State, path: Path, checkpoint_format: str) -> None:
    """Write a canonical state, whole or not at all, and make `last`, beside it, hold its name.

    Raises OutputError when the file exists or can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"can't make the folder {path.parent}: {error.strerror}") from error
    tensors = {
        name: TensorData.from_bytes(dtype_name(tensor), tuple(tensor.shape), tensor_bytes(tensor))
        for name, tensor in state.items()
    }
    writers.write(Contents(nest(state), tensors), path, checkpoint_format)
    with atomic_output(path.with_name("last"), force=True) as partial:
        partial.write_text(f"{path.name}\n", encoding="utf-8")


def nest(state: State) -> dict[str, Any]:
    """The names as nested dicts: "model" is a state_dict, "optimizer" has one dict a parameter."""
    tree: dict[str, Any] = {}
    for name in state:
        top, _, rest = name.partition(".")
        keys = [top, *rest.rsplit(".", 1)] if top == "optimizer" else [top, rest]
        branch = tree
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
        branch[keys[-1]] = Leaf(name)
    return tree


def load(path: Path) -> State:
    """Read a canonical state from a checkpoint of any format; a --save folder means the file that its `last` names.

    Values are taken as they are, NaN and huge ones too; further tensors and objects are of no concern.
    Raises UsageError, CheckpointError, or MismatchError for a tensor that torch can't hold.
    """
    if (path / "last").is_file():
        path = _newest(path)
    with open_checkpoint(path) as checkpoint:
        contents = contents_of(checkpoint, drop=True)
        state = {name: _tensor(name, data) for name, data in contents.tensors.items()}
    return state | {alias: state[name] for alias, name in contents.aliases.items()}


def _tensor(name: str, data: TensorData) -> torch.Tensor:
    dtype = getattr(torch, data.dtype, None)
    if not isinstance(dtype, torch.dtype) or data.layout.packed:
        raise MismatchError(f"can't resume: {name} is {data.dtype}, which torch has no numbers for")
    content = bytearray(data.read())
    tensor = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return tensor.reshape(data.shape)


def _newest(folder: Path) -> Path:
    """The checkpoint that a --save folder's `last` names."""
    try:
        name = (folder / "last").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder / 'last'} can't be read: {error}") from error
    return folder / Path(name).name
