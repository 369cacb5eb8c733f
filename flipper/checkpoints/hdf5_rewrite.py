"""Rewriting HDF5 elements without bytes of their own: in the chunk's old place if the new one fits, else by HDF5."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flipper.bits.layout import Bits
from flipper.checkpoints.elements import Bytes, Int
from flipper.checkpoints.hdf5_boxed import BoxReader, by_chunk, numbers_in, split
from flipper.checkpoints.hdf5_chunks import shifts
from flipper.checkpoints.hdf5_headers import checksum, messages
from flipper.checkpoints.hdf5_pipeline import Pipeline, Stored, pipeline, put_chunk
from flipper.checkpoints.source import Source
from flipper.checkpoints.tensor import Tensor
from flipper.errors import CheckpointError

LAYOUT = 0x08
"""Kind of the message in an object header that holds the elements of a compact dataset (section IV.A.2.i there)."""

Put = Callable[[int, bytes], object]
"""Writes bytes at a place of the file; HDF5 keeps no chunk in memory when its chunk cache is off."""


@dataclass(frozen=True)
class Rewritten:
    """A file that is being rewritten: its bytes to read and to put, and how many stand in front of the HDF5 content.

    stale: Fletcher-32 checksums stay as they were.
    """

    source: Source
    put: Put
    userblock: int
    stale: bool = False


def rewrite_boxed(dataset: Any, tensor: Tensor, order: str, edit: tuple[Int, Bits], file: Rewritten) -> None:
    """XOR elements of an h5py DatasetID that is open for writing, without a chunk cache.

    edit: flat indexes, distinct, and the XOR of each element. file: the one that the dataset is in.
    """
    flat, xor = edit
    reader = BoxReader(dataset)
    number, within = split(reader, tensor.layout, flat)
    with pipeline(dataset) as scratch:
        for chunk, positions in by_chunk(number):
            old = reader.region(chunk)
            new = reader.padded(chunk, old.copy())
            values = numbers_in(new, tensor.layout, order)
            values[within[positions]] ^= xor[positions].astype(values.dtype)
            _Box(reader, scratch, chunk, file).store(old, reader.clipped(chunk, new))


class _Box:
    """One chunk that gets new content."""

    def __init__(self, reader: BoxReader, scratch: Pipeline | None, chunk: int, file: Rewritten) -> None:
        self.reader = reader
        self.scratch = scratch
        self.chunk = chunk
        self.file = file
        self.origin = reader.grid.origin(chunk)

    def store(self, before: Bytes, region: Bytes) -> None:
        """Give the part of the chunk that lies inside the array, which held `before`, new content."""
        if self.scratch is not None and (found := self._stored()) is not None:
            start, old = found
            whole = self._whole(self.scratch, old, before, region)
            if whole is not None:
                new = self.scratch.encoding(whole, old)
                self._put(self.scratch.with_checksum_of(old, new) if self.file.stale else new, old, start)
                return
        elif self._put_in_header(before, region):
            return
        self._let_hdf5(region)

    def _put_in_header(self, before: Bytes, region: Bytes) -> bool:
        """Patch the elements of a compact dataset: HDF5 would write the time of day beside them."""
        from h5py import h5o

        if self.reader.chunked:
            return False
        file, old = self.file, before.tobytes()
        try:
            for message in messages(file.source, file.userblock, h5o.get_info(self.reader.dataset).addr):
                at = 12 + 4 * message.data[1] if message.data[:1] in (b"\1", b"\2") else 4
                if message.kind != LAYOUT or message.data[at : at + len(old)] != old:
                    continue
                file.put(message.start + at, region.tobytes())
                if message.summed is not None:
                    begin, end = message.summed
                    file.put(end, checksum(file.source.read(begin, end - begin)).to_bytes(4, "little"))
                return True
        except (CheckpointError, struct.error):
            pass
        return False

    def _put(self, new: Stored, old: Stored, start: int | None) -> None:
        if start is not None and new.skipped == old.skipped and len(new.data) == len(old.data):
            self.file.put(start, new.data)
        else:
            put_chunk(self.reader.dataset, self.origin, new, (old.skipped, len(old.data)))

    def _stored(self) -> tuple[int | None, Stored] | None:
        """The chunk as it lies in the file, and where if that is sure; None if it was never written."""
        if self.chunk not in self.reader.stored:
            return None
        _, said, size = self.reader.stored[self.chunk]
        skipped, data = self.reader.dataset.read_direct_chunk(self.origin)
        source = self.file.source
        for start in (said + shift for shift in shifts(self.file.userblock)):
            if start + size <= source.size and source.read(start, size) == data:
                return start, Stored(skipped, bytes(data))
        return None, Stored(skipped, bytes(data))

    def _whole(self, scratch: Pipeline, old: Stored, before: Bytes, region: Bytes) -> Bytes | None:
        """The new chunk with what stood past the array kept; None if the old one is not what the filters say.

        HDF5 may store edge chunks without filters (H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS) and doesn't tell.
        """
        if len(region) == self.reader.size:
            return region
        whole = scratch.decode(old, self.reader.size)
        if whole is None or not np.array_equal(self.reader.clipped(self.chunk, whole), before):
            return None
        return self.reader.replaced(self.chunk, whole, region)

    def _let_hdf5(self, region: Bytes) -> None:
        """Write through HDF5; a chunk that would not come back as it should (lossy filters) is stored unfiltered."""
        if not self._written_exactly(region):
            whole = self.reader.padded(self.chunk, region)
            skip_all = (1 << self.reader.dataset.get_create_plist().get_nfilters()) - 1
            put_chunk(self.reader.dataset, self.origin, Stored(skip_all, whole.tobytes()), self._held())

    def _written_exactly(self, region: Bytes) -> bool:
        try:
            self.reader.write_region(self.chunk, region)
            return np.array_equal(self.reader.read_region(self.chunk), region)
        except (OSError, RuntimeError, ValueError):
            return False

    def _held(self) -> tuple[int, int]:
        """Filter mask and size of the chunk that is there now."""
        try:
            skipped, data = self.reader.dataset.read_direct_chunk(self.origin)
        except (OSError, RuntimeError, ValueError):  # HDF5 could write none
            return 0, 0
        return skipped, len(data)
