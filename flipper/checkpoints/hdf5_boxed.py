"""HDF5 elements that have no bytes of their own: filtered chunks, compact datasets, chunks never written."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flipper.bits import BitLayout
from flipper.bits.layout import Bits
from flipper.checkpoints.elements import Bytes, Int
from flipper.checkpoints.hdf5_chunks import Grid, stored_chunks
from flipper.checkpoints.hdf5_pipeline import FLETCHER32
from flipper.checkpoints.tensor import Boxed, Tensor
from flipper.errors import CheckpointError

CACHE = 64 << 20
"""Bytes of decoded chunks that a reader keeps, and of a band of chunks that is streamed."""
BAND = 4 << 20
"""Bytes of a band at least, so that small chunks are read many at a time."""
BAND_CHUNKS = 4096
"""Chunks of such a band at most: HDF5 needs some kB for each chunk of a selection."""


@dataclass(frozen=True)
class Boxes(Boxed):
    """The place of a dataset that HDF5 itself has to read and write.

    storage: "filtered", "compact", "sparse" (some chunks were never written) or "empty".
    path: the dataset in the file. order: byte order of its elements.
    """

    path: bytes = b""
    order: str = "little"


class BoxReader:
    """Chunks of one dataset as raw bytes in the file's own byte order; a compact dataset is one chunk."""

    def __init__(self, dataset: Any) -> None:
        from h5py import h5d

        self.dataset = dataset
        self.datatype = dataset.get_type()
        plist = dataset.get_create_plist()
        self.chunked = plist.get_layout() == h5d.CHUNKED
        chunk = plist.get_chunk() if self.chunked else dataset.shape
        self.grid = Grid(dataset.shape, chunk)
        self.size = math.prod(self.grid.chunk) * self.datatype.get_size()
        filters = [plist.get_filter(index)[0] for index in range(plist.get_nfilters())]
        self.checked = FLETCHER32 in filters
        self.unfiltered = (1 << len(filters)) - 1
        self._decoded: OrderedDict[int, Bytes] = OrderedDict()

    def chunk(self, number: int) -> Bytes:
        """All bytes of a chunk; zeros where it reaches past the array."""
        if number in self._decoded:
            self._decoded.move_to_end(number)
            return self._decoded[number]
        while self._decoded and (len(self._decoded) + 1) * self.size > CACHE:
            self._decoded.popitem(last=False)
        data = self._decoded[number] = self.padded(number, self.region(number))
        return data

    @cached_property
    def stored(self) -> dict[int, tuple[int, int, int]]:
        """Filter mask, byte and size of each chunk that is in the file, by number; the rest holds the fill value."""
        table = stored_chunks(self.dataset)
        numbers = self.grid.numbers(table[:, :-3])
        known = np.flatnonzero((numbers >= 0) & (numbers < self.grid.total))
        known = known[np.argsort(numbers[known], kind="stable")]
        return dict(zip(numbers[known].tolist(), map(tuple, table[known, -3:].tolist()), strict=True))

    def written(self) -> list[int]:
        """The numbers of the chunks that are in the file, ascending."""
        return list(self.stored) if self.chunked else [0]

    def region(self, number: int) -> Bytes:
        """The bytes of the part of a chunk that lies inside the array; raises CheckpointError if it is damaged."""
        if self.chunked:
            self._check_length(number)
        return self.read_region(number)

    def read_region(self, number: int) -> Bytes:
        """As `region`, of a chunk whose length is known to be right."""
        origin = self.grid.origin(number)
        return self._read(origin, self.grid.extent(origin))

    def _check_length(self, number: int) -> None:
        """Refuse a stored chunk that is shorter than what its filters read: HDF5 2.0 goes on past its end, and dies."""
        if number not in self.stored:
            return
        mask, _, size = self.stored[number]
        least = self.size if mask == self.unfiltered else 4 if self.checked else 1
        if size < least:
            seen = f"the chunk at {self.grid.origin(number)} has {size} bytes"
            raise CheckpointError("header", f"{seen}, its filters need {least} at least")

    def _read(self, origin: tuple[int, ...], shape: tuple[int, ...]) -> Bytes:
        memory, stored = self._spaces(origin, shape)
        data = np.zeros(math.prod(shape) * self.datatype.get_size(), np.uint8)
        try:
            self.dataset.read(memory, stored, data, self.datatype)
        except (OSError, RuntimeError) as error:
            line = " ".join(str(error).split())[:200]
            reason = "checksum" if self.checked else "header"
            raise CheckpointError(reason, f"the chunk at {origin} can't be read: {line}") from error
        return data

    def rows(self, first: int, last: int) -> Bytes:
        """The bytes of some rows along the first axis; raises CheckpointError if a chunk is damaged."""
        if first == 0 and self.chunked:
            for number in self.stored:
                self._check_length(number)
        shape = (last - first, *self.grid.dims[1:])
        return self._read((first, *(0 for _ in shape[1:])), shape)

    def write_region(self, number: int, data: Bytes) -> None:
        """Let HDF5 write the part of a chunk that lies inside the array."""
        origin = self.grid.origin(number)
        memory, stored = self._spaces(origin, self.grid.extent(origin))
        self.dataset.write(memory, stored, data, self.datatype)

    def padded(self, number: int, region: Bytes) -> Bytes:
        """The whole chunk around a region, zeros past the array."""
        if len(region) == self.size:
            return region
        return self.replaced(number, np.zeros(self.size, np.uint8), region)

    def replaced(self, number: int, whole: Bytes, region: Bytes) -> Bytes:
        """A whole chunk with the part inside the array replaced by `region`."""
        changed = whole.copy()
        inside = self._inside(number, changed)
        inside[...] = self._elements(region).reshape(inside.shape)
        return changed

    def clipped(self, number: int, whole: Bytes) -> Bytes:
        """The part inside the array of a whole chunk."""
        return np.ascontiguousarray(self._inside(number, whole)).reshape(-1).view(np.uint8)

    def _inside(self, number: int, whole: Bytes) -> Any:
        extent = self.grid.extent(self.grid.origin(number))
        return self._elements(whole).reshape(self.grid.chunk)[tuple(slice(count) for count in extent)]

    def _elements(self, data: Bytes) -> Any:
        """Bytes as an array of elements of no kind; an axis more for their bytes could be more than numpy has."""
        return data.view(f"V{self.datatype.get_size()}")

    def _spaces(self, origin: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Memory space and file space of a part of the array."""
        from h5py import h5s

        stored = self.dataset.get_space()
        if not shape:
            return stored, stored
        stored.select_hyperslab(origin, shape)
        return h5s.create_simple(shape), stored  # HDF5 2.0 divides by zero where 32 axes are read into one


def by_chunk(number: Int) -> Iterator[tuple[int, Int]]:
    """Each chunk that occurs in `number`, ascending, with the positions in `number` at which it does."""
    rank = np.argsort(number, kind="stable")
    ordered = number[rank]
    edges = np.flatnonzero(np.diff(ordered)) + 1
    for positions in np.split(rank, edges):
        if len(positions):
            yield int(number[positions[0]]), positions


def read_boxed(reader: BoxReader, tensor: Tensor, flat: Int, order: str) -> Bits:
    """The elements at flat indexes, as numbers (uint64, same order)."""
    number, within = split(reader, tensor.layout, flat)
    bits = np.zeros(len(flat), np.uint64)
    for chunk, positions in by_chunk(number):
        bits[positions] = numbers_in(reader.chunk(chunk), tensor.layout, order)[within[positions]]
    return bits


def stream(reader: BoxReader, tensor: Tensor, order: str, count: int) -> Iterator[Bits]:
    """All elements in row-major order, `count` at a time; each chunk is decoded once unless a row of them is huge."""
    height = reader.grid.chunk[0] if reader.grid.chunk else 0
    band = height * math.prod(reader.grid.dims[1:]) * reader.datatype.get_size()
    if not height or band > CACHE:
        for first in range(0, tensor.elements, count):
            yield read_boxed(reader, tensor, np.arange(first, min(first + count, tensor.elements)), order)
        return
    chunks = math.prod(reader.grid.counts[1:])
    height *= max(1, min(BAND // max(band, 1), BAND_CHUNKS // chunks))
    left = np.zeros(0, np.uint64)
    for first in range(0, reader.grid.dims[0], height):
        data = reader.rows(first, min(first + height, reader.grid.dims[0]))
        left = np.concatenate((left, numbers_in(data, tensor.layout, order).astype(np.uint64)))
        whole = len(left) // count * count
        for start in range(0, whole, count):
            yield left[start : start + count]
        left = left[whole:]
    if len(left):
        yield left


def split(reader: BoxReader, layout: BitLayout, flat: Int) -> tuple[Int, Int]:
    """The chunk of each element (real number), and its index among the real numbers of that chunk."""
    item, component = np.divmod(flat, layout.components)
    number, within = reader.grid.split(item)
    return number, within * layout.components + component


def numbers_in(data: Bytes, layout: BitLayout, order: str) -> np.ndarray[Any, Any]:
    """Raw bytes as unsigned numbers; shares the bytes, so that a change of the numbers changes them."""
    code = "<" if order == "little" else ">"
    return data.view(f"{code}u{layout.itemsize}")
