"""HDF5: datasets by their paths; h5py reads the index, the elements are patched where they lie."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flipper.bits.layout import Bits
from flipper.checkpoints import keras_names
from flipper.checkpoints.checkpoint import BLOCK_ELEMENTS, Checkpoint, Edit, Region
from flipper.checkpoints.elements import Int
from flipper.checkpoints.hdf5_boxed import Boxes, BoxReader, read_boxed, stream
from flipper.checkpoints.hdf5_chunks import Chunks
from flipper.checkpoints.hdf5_index import Indexer
from flipper.checkpoints.hdf5_rewrite import Rewritten, rewrite_boxed
from flipper.checkpoints.hdf5_superblock import Superblock, find_signature, read_superblock
from flipper.checkpoints.source import Source
from flipper.checkpoints.tensor import Tensor
from flipper.checkpoints.ties import settle
from flipper.checkpoints.tree import Tree
from flipper.errors import CheckpointError, FlipperError, OutputError


def sniff(source: Source) -> bool:
    """Whether there is an HDF5 signature, at the beginning or behind a userblock."""
    return find_signature(source) is not None


class Hdf5File(Checkpoint):
    """One HDF5 file."""

    format = "hdf5"
    rewrites_in_place = True

    def __init__(self, path: Path) -> None:
        source = Source(path)
        self._userblock = check_whole(source).start
        with damage_reported(path):
            self._index = Indexer(source, lambda: opened(path), self._userblock).index()
        tensors = settle(self._index.tensors, self._index.aliases)
        super().__init__(path, {"": source}, keras_names.with_layer_names(tensors, self._index.layer_names))
        self.notes = self._index.notes + keras_names.note(self._index.layer_names, self._index.keras)

    def tree(self) -> Tree:
        """Nested dicts, one a group; in a file that flipper wrote, the structure that it recorded."""
        with damage_reported(self.path):
            return self._index.tree()

    def blocks(self, tensor: Tensor, count: int = BLOCK_ELEMENTS) -> Iterator[Bits]:
        """All elements in row-major order, up to `count` at a time (`count` is a multiple of 8)."""
        place = tensor.place
        if not isinstance(place, Boxes | Chunks) or not tensor.elements:
            yield from super().blocks(tensor, count)
            return
        with opened(self.path) as file:
            yield from stream(BoxReader(_dataset(file, place)), tensor, place.order, count)

    def rewrite(
        self, target: Path, file: str, edits: Sequence[Edit], keep_checksums: bool = False
    ) -> tuple[Region, ...]:
        """XOR elements of filtered, compact and sparse datasets in `target`, a copy of the file.

        A filtered chunk keeps its place when it can be encoded in the size that it had, else HDF5 moves it and the
        file may grow. Raises OutputError when HDF5 can't write the target.
        """
        with (
            _failure_reported(target),
            open(target, "r+b", buffering=0) as raw,
            closing(Source(target)) as source,
            h5py_file(target, "r+", rdcc_nbytes=0) as written,
        ):
            patched = Rewritten(
                source, lambda start, data: os.pwrite(raw.fileno(), data, start), self._userblock, keep_checksums
            )
            for tensor, flat, xor in edits:
                place = tensor.place
                if isinstance(place, Boxes) and len(flat):
                    rewrite_boxed(_dataset(written, place), tensor, place.order, (flat, xor), patched)
        return ()

    def problems(self) -> Iterator[str]:
        """Chunks that HDF5 can't decode: a Fletcher-32 checksum that doesn't hold, a damaged compressed stream."""
        with opened(self.path) as file:
            for tensor in self.tensors:
                if isinstance(tensor.place, Boxes) and tensor.elements:
                    yield from _bad_chunks(tensor.name, BoxReader(_dataset(file, tensor.place)))

    def _read_boxed(self, tensor: Tensor, flat: Int) -> Bits:
        place = tensor.place
        if not isinstance(place, Boxes):
            return super()._read_boxed(tensor, flat)
        if not len(flat):
            return np.zeros(0, np.uint64)
        with opened(self.path) as file:
            return read_boxed(BoxReader(_dataset(file, place)), tensor, flat, place.order)


def _dataset(file: Any, place: Boxes | Chunks) -> Any:
    from h5py import h5d

    return h5d.open(file.id, place.path)


def _bad_chunks(name: str, reader: BoxReader) -> Iterator[str]:
    for number in reader.written():
        try:
            reader.region(number)
        except CheckpointError as error:
            yield f"{name}: {error}"


def h5py_file(file: Any, mode: str = "r", **options: Any) -> Any:
    """The h5py.File of a path or file object, without h5py's own lock."""
    import h5py

    return h5py.File(file, mode, locking=False, **options)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file as an h5py.File to read; whatever HDF5 finds wrong in it becomes a CheckpointError."""
    with damage_reported(path), h5py_file(path) as file:
        yield file


@contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """Turn what h5py raises over a damaged file (any kind of exception) into a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError as error:
        text = str(error).removesuffix(f" [{error.reason}]")
        if text.startswith(str(path)):
            raise
        raise CheckpointError(error.reason, f"{path}: {text}") from error
    except FlipperError:
        raise
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise CheckpointError("header", f"{path}: HDF5 can't read it: {line or type(error).__name__}") from error


@contextmanager
def _failure_reported(target: Path) -> Iterator[None]:
    try:
        yield
    except FlipperError:
        raise
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise OutputError(f"{target}: HDF5 can't write it: {line or type(error).__name__}") from error


def check_whole(source: Source) -> Superblock:
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
    return block


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
