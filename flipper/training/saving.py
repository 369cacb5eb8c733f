"""Canonical states as files: written by flipper's writers, read from whatever flipper can open."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch

from flipper.checkpoints import Checkpoint, open_checkpoint, writers
from flipper.checkpoints.output import atomic_output
from flipper.checkpoints.source import Source
from flipper.checkpoints.tensor import Tensor as Stored
from flipper.checkpoints.tree import Leaf
from flipper.checkpoints.writers import Contents, TensorData
from flipper.checkpoints.writers.contents import data_of
from flipper.errors import MismatchError, OutputError
from flipper.text_files import read_named
from flipper.training import dcp
from flipper.training.canonical import State, dtype_name, tensor_bytes
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.shards import Shard, whole

T = TypeVar("T")

PREFIXES: Final = ("model.", "optimizer.", "scheduler.", "progress.", "rng.")
"""What the names of a canonical state begin with."""


def save(state: State, path: Path, checkpoint_format: str, force: bool = False) -> None:
    """Write a canonical state, whole or not at all, and make `last`, beside it, hold its name.

    force: replace a file that is there. Raises OutputError when the file exists or can't be written.
    """
    if path.exists() and not force:
        raise OutputError(exists(path))
    _make_parent(path)
    if checkpoint_format == "dcp":
        ties = contents(state).aliases
        with atomic_output(path, force, directory=True) as partial:
            shards = {name: whole(tensor) for name, tensor in state.items() if name not in ties}
            dcp.write(shards, partial, path, ties, _keys(state), alone=True)
    else:
        writers.write(contents(state), path, checkpoint_format, force)
    _tell_last(path)


def save_shards(
    shards: Mapping[str, Shard], ties: Mapping[str, str], path: Path, grid: Grid, force: bool = False
) -> None:
    """The same by torch.distributed.checkpoint, of shards that each rank writes itself; a collective.

    shards: those that this rank speaks for. ties: further name -> name of a tensor that is one with it.
    """
    names = {name for rank in grid.everyone(sorted(shards)) for name in rank}
    with ExitStack() as stack:
        place = _agreed(grid, lambda: stack.enter_context(_new_directory(path, force)))
        dcp.write(shards, place, path, ties, _keys({*names, *ties}))
        _agreed(grid, stack.close)
    if grid.rank == 0:
        _tell_last(path)


@contextmanager
def _new_directory(path: Path, force: bool) -> Iterator[Path]:
    _make_parent(path)
    with atomic_output(path, force, directory=True) as partial:
        yield partial


def _agreed(grid: Grid, work: Callable[[], T]) -> T:
    """What rank 0's work gives, or the OutputError that it raises, on every rank."""
    said: Any = None
    if grid.rank == 0:
        try:
            said = work()
        except OutputError as error:
            said = error
    said = grid.everyone(said)[0]
    if isinstance(said, OutputError):
        raise said
    return cast(T, said)


def _tell_last(path: Path) -> None:
    """Make `last`, beside a checkpoint, hold its name."""
    with atomic_output(path.with_name("last"), force=True) as partial:
        partial.write_text(f"{path.name}\n", encoding="utf-8")


def _make_parent(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"can't make the folder {path.parent}: {error.strerror}") from error


def exists(path: Path) -> str:
    """What is said of a checkpoint that would be written over."""
    return f"{path} exists; choose another --save folder or remove it"


def check_folder(folder: Path) -> None:
    """Raise OutputError when nothing can be saved to a folder, before hours are spent; it is not made."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise OutputError(f"can't save to {folder}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(f"can't save to {folder}: {there} can't be written to")


def contents(state: State) -> Contents:
    """A state as flipper's writers take it; names of one tensor are tied."""
    names: dict[int, str] = {}
    for name in sorted(state):
        names.setdefault(id(state[name]), name)
    tensors = {
        name: TensorData.from_bytes(dtype_name(tensor), tuple(tensor.shape), tensor_bytes(tensor))
        for name, tensor in state.items()
        if names[id(tensor)] == name
    }
    aliases = {name: names[id(tensor)] for name, tensor in state.items() if names[id(tensor)] != name}
    return Contents(nest(state), tensors, aliases)


def nest(state: State) -> dict[str, Any]:
    """The names as nested dicts: "model" is a state_dict, "optimizer" has one dict a parameter."""
    tree: dict[str, Any] = {}
    for name, keys in _keys(state).items():
        branch = tree
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
        branch[keys[-1]] = Leaf(name)
    return tree


def _keys(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Of each name, those of the nested dicts that it stands in."""
    found = {}
    for name in names:
        top, _, rest = name.partition(".")
        found[name] = (top, *rest.rsplit(".", 1)) if top == "optimizer" else (top, rest)
    return found


def load(path: Path) -> State:
    """Read a canonical state from a checkpoint of any format; a --save folder means the file that its `last` names.

    Values are taken as they are, NaN and huge ones too; tensors of other names and objects are of no concern. Where
    the file holds a tensor's bytes in one run, the tensor is that part of the file, mapped and read when it is used:
    a rank that copies its shard into a model never holds the whole state. What DCP has in several chunks is read whole.
    Raises UsageError, CheckpointError, or MismatchError for a tensor that torch can't hold.
    """
    if (path / "last").is_file():
        path = _newest(path)
    with open_checkpoint(path) as checkpoint:
        state = {}
        for _, names, tensor in tensors_of(checkpoint, PREFIXES):
            state.update(dict.fromkeys(names, tensor))
    return state


def tensors_of(
    checkpoint: Checkpoint, prefixes: tuple[str, ...] = ("",)
) -> Iterator[tuple[Stored, list[str], torch.Tensor]]:
    """The tensors of an open checkpoint with a name that begins so: as they are stored, those names, and as torch's.

    Raises MismatchError for one that torch can't hold.
    """
    maps = {file: _mapped(source) for file, source in checkpoint.sources.items()}
    for stored in checkpoint.tensors:
        if names := [name for name in stored.names if name.startswith(prefixes)]:
            yield stored, names, _tensor(checkpoint, stored, maps)


def _mapped(source: Source) -> memoryview:
    """The file's bytes, read where they are looked at; what is written to them stays in memory."""
    with open(source.path, "rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if source.size else bytearray())
    return whole[source.start : source.start + source.size]


def _tensor(checkpoint: Checkpoint, tensor: Stored, maps: Mapping[str, memoryview]) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype, None)
    if not tensor.supported or not isinstance(dtype, torch.dtype) or tensor.layout.packed:
        seen = tensor.place.reason or f"{tensor.dtype}, which torch has no numbers for"
        raise MismatchError(f"{tensor.name} can't be taken over into torch: it is {seen}")
    place = tensor.place
    swapped = dtype.itemsize > 1 and getattr(place, "order", "little") == "big"
    start = None if swapped else place.offset
    if start is None or start % dtype.itemsize:  # torch computes on its machine's numbers, aligned
        content = memoryview(bytearray(data_of(checkpoint, tensor).read()))
    else:
        content = maps[place.file][start : start + tensor.nbytes]
    whole = torch.frombuffer(content, dtype=dtype) if content.nbytes else torch.empty(0, dtype=dtype)
    return whole.reshape(tensor.shape)


def _newest(folder: Path) -> Path:
    """The checkpoint that a --save folder's `last` names."""
    return folder / Path(read_named(folder / "last").strip()).name
