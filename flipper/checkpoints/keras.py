"""keras: a .keras archive, whose weights are an HDF5 file inside it; elements are patched there, CRCs repaired."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flipper.checkpoints import archive_crcs, keras_names
from flipper.checkpoints.archives import STORED, Archive
from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.elements import Bytes, Int
from flipper.checkpoints.hdf5 import check_whole, damage_reported, h5py_file
from flipper.checkpoints.hdf5_boxed import Boxes
from flipper.checkpoints.hdf5_chunks import Chunks
from flipper.checkpoints.hdf5_index import Indexer
from flipper.checkpoints.source import Source
from flipper.checkpoints.tensor import Extent, Place, Tensor, Unsupported
from flipper.checkpoints.ties import settle
from flipper.checkpoints.tree import Tree
from flipper.errors import CheckpointError

WEIGHTS = "model.weights.h5"
CONFIG = "config.json"
CONFIG_LIMIT = 64 << 20
"""Bytes of a config.json that is read for layer names."""


def sniff(source: Source) -> bool:
    """Whether it is a zip archive with Keras' weights; raises CheckpointError for an archive that is cut off."""
    return source.head(4) == b"PK\3\4" and WEIGHTS in Archive(source).by_name


class KerasFile(Checkpoint):
    """One .keras file."""

    format = "keras"

    def __init__(self, path: Path) -> None:
        source = Source(path)
        self.archive = Archive(source)
        entry = self.archive.by_name[WEIGHTS]
        if entry.method != STORED:
            again = "unpack it and zip it again with `zip -0`"
            raise CheckpointError("unsupported-storage", f"{path}: {WEIGHTS} is compressed in the archive; {again}")
        start = self.archive.data_start(entry)
        weights = source.window(start, entry.size)
        with damage_reported(path):
            userblock = check_whole(weights).start
            self._index = Indexer(weights, lambda: _opened(weights), userblock).index()
        names = {**self._names_in_config(), **self._index.layer_names}
        tensors = settle([_moved(tensor, start) for tensor in self._index.tensors], self._index.aliases)
        super().__init__(path, {"": source}, keras_names.with_layer_names(tensors, names))
        self.notes = self._index.notes + keras_names.note(names, self._index.keras)

    def tree(self) -> Tree:
        """Nested dicts, one a group of the weights."""
        with damage_reported(self.path):
            return self._index.tree()

    def checksum_masks(self, file: str, offsets: Int, masks: Bytes) -> tuple[Int, Bytes]:
        """The bytes of every stored copy of the weights' CRC."""
        return archive_crcs.crc_masks([(0, self.archive)], offsets, masks)

    def problems(self) -> Iterator[str]:
        """Entries whose local header or CRC doesn't hold."""
        return archive_crcs.problems(self.archive)

    def _names_in_config(self) -> dict[tuple[str, ...], str]:
        """The layers' names as the model's configuration gives them; none where it can't be read."""
        entry = self.archive.by_name.get(CONFIG)
        if entry is None or entry.method != STORED or entry.size > CONFIG_LIMIT:
            return {}
        text = self.archive.source.read(self.archive.data_start(entry), entry.size)
        try:
            return keras_names.names_in_config(json.loads(text))
        except (ValueError, RecursionError):
            return {}


class _Reader(io.RawIOBase):
    """A source as a file to read, for h5py."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.source.size)[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.source.size - self.position))
        buffer[:count] = self.source.read(self.position, count)
        self.position += count
        return count


@contextmanager
def _opened(weights: Source) -> Iterator[Any]:
    with damage_reported(weights.path), h5py_file(_Reader(weights)) as file:
        yield file


def _moved(tensor: Tensor, start: int) -> Tensor:
    """The same tensor in the archive, where the weights begin at byte `start`."""
    return replace(tensor, place=_place_moved(tensor.place, start))


def _place_moved(place: Place, start: int) -> Place:
    if isinstance(place, Extent):
        return replace(place, start=place.start + start)
    if isinstance(place, Chunks):
        return replace(place, base=start)
    if isinstance(place, Boxes) and place.storage != "empty":
        return Unsupported("", f"{place.storage} elements inside an archive: unpack {WEIGHTS} and strike that")
    return place
