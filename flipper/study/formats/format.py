"""Format: how pieces of tensors become a checkpoint and come back; and the formats of one file, written by rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from flipper.errors import FlipperError, OutputError
from flipper.training.canonical import State
from flipper.training.dcp import reason
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.layout import put_together
from flipper.training.parallel.shards import Shard

Shards = Mapping[str, Shard]


class Pending(Protocol):
    """A save that goes on."""

    def add_done_callback(self, function: Callable[[Any], Any]) -> None:
        """Call it with this at the end."""

    def result(self) -> Any:
        """Wait for its end; raises what it raised."""


class Format(Protocol):
    """A way to save and to load; both are collectives.

    shards: of `save`, those that this rank speaks for, together the whole state; of `load`, what this rank needs, to be
    filled. path: a file or a directory that isn't there yet. fsync: return when it is on the disk.
    """

    def prepare(self, grid: Grid) -> None:
        """What is done once for a run and not measured: imports, process groups."""

    def save(self, shards: Shards, grid: Grid, path: Path, fsync: bool) -> None:
        """Save before it returns."""

    def load(self, shards: Shards, grid: Grid, path: Path) -> None:
        """Fill the shards."""


class Asynchronous(Format, Protocol):
    """A format that can also be saved while training goes on."""

    def save_async(self, shards: Shards, grid: Grid, path: Path, fsync: bool) -> Pending:
        """Save what the shards hold now, after it has returned."""


@dataclass(frozen=True)
class OneFile:
    """Rank 0 gathers the state and writes it; every rank opens the file.

    write: writes whole tensors. opened: gives a function from a name and a box to that part of the tensor.
    ready: run once before anything is measured.
    """

    write: Callable[[State, Path], None]
    opened: Callable[[Path], Any]
    ready: Callable[[], None] = lambda: None

    def prepare(self, grid: Grid) -> None:
        self.ready()

    def save(self, shards: Shards, grid: Grid, path: Path, fsync: bool) -> None:
        state = gathered(shards, grid)
        if grid.rank == 0:
            self.write(state, path)
            if fsync:
                synced(path)

    def load(self, shards: Shards, grid: Grid, path: Path) -> None:
        with self.opened(path) as read:
            for name, shard in shards.items():
                shard.tensor.copy_(read(name, shard.box))


def gathered(shards: Shards, grid: Grid) -> State:
    """Whole tensors on rank 0, else nothing; a collective. With one rank there is nothing to gather, nor to copy."""
    if grid.world == 1:
        return {name: shard.tensor.detach().cpu() for name, shard in shards.items()}
    return put_together(grid, shards)


@contextmanager
def told(format: str, folder: Path) -> Iterator[None]:
    """Turn whatever a library raises while it saves into an OutputError of one line."""
    try:
        yield
    except FlipperError:
        raise
    except (Exception, CheckpointException) as error:  # the second is no Exception
        raise OutputError(f"{folder}: {format} can't be written there: {reason(error)}") from error


@contextmanager
def nothing_to_close(read: Callable[[str, tuple[slice, ...]], Tensor]) -> Iterator[Any]:
    """A reader for `with`, of a file that was read already."""
    yield read


def synced(path: Path) -> None:
    """Wait until a file, or all files of a directory, and its name are on the disk."""
    for each in (*(path.iterdir() if path.is_dir() else ()), path, path.parent):
        descriptor = os.open(each, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def as_array(tensor: Tensor) -> tuple[Any, str | None]:
    """A tensor as numpy has it, no copy; dtypes that numpy lacks as unsigned numbers, with torch's name beside."""
    if tensor.dtype in _UNKNOWN_TO_NUMPY:
        return tensor.contiguous().view(_UNKNOWN_TO_NUMPY[tensor.dtype]).numpy(), str(tensor.dtype)
    return tensor.contiguous().numpy(), None


def as_tensor(array: Any, dtype: str | None) -> Tensor:
    """The tensor again."""
    tensor = torch.from_numpy(array) if getattr(array, "shape", None) else torch.as_tensor(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype.removeprefix("torch.")))


_UNKNOWN_TO_NUMPY = {
    torch.bfloat16: torch.uint16,
    **{getattr(torch, name): torch.uint8 for name in dir(torch) if name.startswith("float8_")},
}
