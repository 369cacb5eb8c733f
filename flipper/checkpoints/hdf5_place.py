"""Where the bytes of an HDF5 dataset lie: its storage layout as a place, or the reason why it has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import Any

from flipper.checkpoints.elements import Int
from flipper.checkpoints.hdf5_boxed import Boxes
from flipper.checkpoints.hdf5_chunks import Chunks, Grid, chunk_starts
from flipper.checkpoints.hdf5_types import ElementType
from flipper.checkpoints.source import Source
from flipper.checkpoints.tensor import Extent, Place, Unsupported
from flipper.errors import CheckpointError

MAX_CHUNK = 1 << 30
"""Bytes of a decoded chunk; HDF5 itself long allowed less than 4 GiB, checkpoints have some MiB."""
MAX_UNFOLDING = 2000
"""Bytes of a dataset for each byte of the file, and at least 1 GiB; deflate's best is 1032."""
MAX_MISSING = 1 << 20
"""Chunks that were never written; they need no byte in the file, so that a few bytes can claim any number."""
NBIT, SCALE_OFFSET = 5, 6
"""HDF5 filter numbers."""

Opener = Callable[[], AbstractContextManager[Any]]


class Places:
    """Finds the places of the datasets of one HDF5 file.

    source: its bytes. opened: opens it as an h5py.File. userblock: bytes in front of the HDF5 content.
    notes: what the user should hear about the datasets so far.
    """

    def __init__(self, source: Source, opened: Opener, userblock: int) -> None:
        self.source = source
        self.opened = opened
        self.userblock = userblock
        self.notes: list[str] = []

    def place(self, name: str, path: bytes, dataset: Any, kind: ElementType) -> Place:
        """The place of a dataset (h5py DatasetID) whose elements flipper knows.

        name: of the tensor. path: of the dataset in the file.
        Raises CheckpointError when its bytes are not all in the file.
        """
        from h5py import h5d

        plist = dataset.get_create_plist()
        layout = plist.get_layout()
        if layout == h5d.VIRTUAL:
            return Unsupported("", f"a virtual dataset over {_virtual_sources(plist)}")
        if plist.get_external_count():
            names = [_text(plist.get_external(index)[0]) for index in range(min(plist.get_external_count(), 8))]
            return Unsupported("", f"its bytes lie in other files: {', '.join(names)}")
        if not math.prod(dataset.shape):
            return Boxes("", "empty", path, kind.order)
        if layout == h5d.COMPACT:
            return Boxes("", "compact", path, kind.order)
        if not dataset.get_storage_size():
            return Unsupported("", "it was never written: HDF5 gives its fill value, the file has no bytes for it")
        if layout == h5d.CONTIGUOUS:
            return self._extent(name, dataset, kind)
        return self._chunked(name, path, dataset, plist, kind)

    def _extent(self, name: str, dataset: Any, kind: ElementType) -> Place:
        start, size = dataset.get_offset(), math.prod(dataset.shape) * dataset.get_type().get_size()
        if start is None or size > dataset.get_storage_size() or start + size > self.source.size:
            place = f"{name!r} needs {size} bytes at byte {start}, the file has {self.source.size}"
            raise CheckpointError("truncated", f"{self.source.path}: {place}")
        return Extent("", start, kind.order)

    def _chunked(self, name: str, path: bytes, dataset: Any, plist: Any, kind: ElementType) -> Place:
        size = dataset.get_type().get_size()
        grid = Grid(dataset.shape, plist.get_chunk())
        if math.prod(grid.chunk) * size > MAX_CHUNK:
            return Unsupported("", f"chunks of {math.prod(grid.chunk) * size} bytes; the limit is {MAX_CHUNK}")
        if math.prod(grid.dims) * size > max(MAX_UNFOLDING * self.source.size, MAX_CHUNK):
            return Unsupported("", f"it claims {math.prod(grid.dims) * size} bytes in a file of {self.source.size}")
        missing = grid.total - dataset.get_num_chunks()
        if missing > 0:
            what = f"{missing} of {grid.total} chunks were never written and hold the fill value"
            if missing > MAX_MISSING:
                return Unsupported("", what)
            self.notes.append(f"{name}: {what}; a fault in one adds it to the file")
        absent = _absent_filters(plist)
        if absent:
            return Unsupported("", f"its filter {absent} is not installed; `pip install hdf5plugin` has most")
        if not _filters_fit(plist, math.prod(grid.chunk), size):
            return Unsupported("", "the options of its filters don't fit its chunks: the file is damaged")
        if missing > 0 or plist.get_nfilters():
            return Boxes("", "filtered" if plist.get_nfilters() else "sparse", path, kind.order)
        return Chunks("", path, grid.chunk, lambda: self._chunk_starts(path), kind.order)

    def _chunk_starts(self, path: bytes) -> Int:
        from h5py import h5d

        with self.opened() as file:
            return chunk_starts(h5d.open(file.id, path), self.source, self.userblock)


def _virtual_sources(plist: Any) -> str:
    count = plist.get_virtual_count()
    names = dict.fromkeys(
        f"{plist.get_virtual_filename(index)}:{plist.get_virtual_dsetname(index)}" for index in range(min(count, 8))
    )
    return ", ".join(names) + (", ..." if count > 8 else "")


def _absent_filters(plist: Any) -> str:
    """The filters of a dataset that nobody has registered, hdf5plugin included; "" if all are there."""
    from h5py import h5z

    filters = [plist.get_filter(index) for index in range(plist.get_nfilters())]
    if not all(h5z.filter_avail(code) for code, *_ in filters):
        with suppress(ImportError):
            import_module("hdf5plugin")  # which registers its filters
    absent = [f"{code} ({_text(name)})" for code, _, _, name in filters if not h5z.filter_avail(code)]
    return ", ".join(absent)


def _filters_fit(plist: Any, elements: int, size: int) -> bool:
    """Whether n-bit and scale-offset are set up for chunks of `elements` of `size` bytes: if not, HDF5 would crash."""
    for code, _, options, _ in (plist.get_filter(index) for index in range(plist.get_nfilters())):
        if code == NBIT and (len(options) < 5 or options[0] != len(options) or options[2] != elements):
            return False
        if code == SCALE_OFFSET and (len(options) < 5 or options[2] != elements or options[4] != size):
            return False
    return True


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
