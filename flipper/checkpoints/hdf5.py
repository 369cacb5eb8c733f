"""HDF5: datasets by their paths; h5py reads the index, the elements are patched where they lie."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.hdf5_index import read_index
from flipper.checkpoints.hdf5_superblock import find_signature, read_superblock
from flipper.checkpoints.source import Source
from flipper.checkpoints.ties import settle
from flipper.errors import CheckpointError, FlipperError


def sniff(source: Source) -> bool:
    """Whether there is an HDF5 signature, at the beginning or behind a userblock."""
    return find_signature(source) is not None


class Hdf5File(Checkpoint):
    """One HDF5 file."""

    format = "hdf5"
    rewrites_in_place = True

    def __init__(self, path: Path) -> None:
        source = Source(path)
        _check_whole(source)
        with opened(path) as file:
            index = read_index(file)
        super().__init__(path, {"": source}, settle(index.tensors, index.aliases))


@contextmanager
def opened(path: Path, mode: str = "r") -> Iterator[Any]:
    """The file as an h5py.File, without h5py's lock; whatever HDF5 finds wrong in it becomes a CheckpointError."""
    import h5py

    with damage_reported(path), h5py.File(path, mode, locking=False) as file:
        yield file


@contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """Turn what h5py raises over a damaged file (any kind of exception) into a CheckpointError."""
    try:
        yield
    except FlipperError as error:
        if str(path) in str(error) or not isinstance(error, CheckpointError):
            raise
        raise CheckpointError(error.reason, f"{path}: {str(error).removesuffix(f' [{error.reason}]')}") from error
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise CheckpointError("header", f"{path}: HDF5 can't read it: {line or type(error).__name__}") from error


def _check_whole(source: Source) -> None:
    """The file is as long as it says and nobody is writing it."""
    block = read_superblock(source)
    if block.end > source.size:
        ends = f"HDF5 believes that it has {block.end} bytes, there are {source.size}"
        raise CheckpointError("truncated", f"{source.path}: {ends}")
    hint = "close it there first; after a crash `h5clear -s FILE` clears the mark"
    if block.writing:
        raise CheckpointError("locked", f"{source.path}: it is marked as open for writing; {hint}")
    if _locked(source.path):
        raise CheckpointError("locked", f"{source.path}: another process holds a lock on it; close it there first")


def _locked(path: Path) -> bool:
    """Whether another process has the file open for writing, as HDF5's own lock (flock) tells; False where it can't."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError("unreadable", f"{path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # network filesystems may have no locks
        return False
    finally:
        os.close(descriptor)
    return False
