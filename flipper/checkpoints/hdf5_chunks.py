"""Chunked HDF5 datasets: which chunk an element lies in, and where the chunks of an unfiltered dataset are."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from flipper.bits import BitLayout
from flipper.checkpoints.elements import Int
from flipper.checkpoints.source import Source
from flipper.checkpoints.tensor import Located
from flipper.errors import CheckpointError

PART = 1 << 20
"""Elements that are located together, which bounds the memory of a locate()."""


@dataclass(frozen=True)
class Grid:
    """An array cut into chunks of equal size; those at the far edges reach past the array.

    dims: shape of the array in real numbers. chunk: shape of a chunk, of the same rank.
    Chunks are numbered row-major over `counts`, the chunks along each axis.
    """

    dims: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-dim // size) for dim, size in zip(self.dims, self.chunk, strict=True))

    @property
    def total(self) -> int:
        """How many chunks there are."""
        return math.prod(self.counts)

    def split(self, flat: Int) -> tuple[Int, Int]:
        """The chunk of each element, and the element's row-major index inside that chunk."""
        number, within = np.zeros_like(flat), np.zeros_like(flat)
        chunks, elements = 1, 1
        for dim, size in zip(reversed(self.dims), reversed(self.chunk), strict=True):
            flat, index = np.divmod(flat, dim)
            outer, inner = np.divmod(index, size)
            number += outer * chunks
            within += inner * elements
            chunks *= -(-dim // size)
            elements *= size
        return number, within

    def origin(self, number: int) -> tuple[int, ...]:
        """Index of the first element of a chunk."""
        index = []
        for count, size in zip(reversed(self.counts), reversed(self.chunk), strict=True):
            number, along = divmod(number, count)
            index.append(along * size)
        return tuple(reversed(index))

    def numbers(self, origins: Int) -> Int:
        """Chunk numbers for origins; one row a chunk."""
        steps = np.cumprod([1, *reversed(self.counts)])[:-1][::-1].astype(np.int64)
        return np.asarray((origins // np.array(self.chunk, np.int64)) @ steps, np.int64)

    def extent(self, origin: tuple[int, ...]) -> tuple[int, ...]:
        """The part of the chunk at `origin` that lies inside the array."""
        ends = zip(self.dims, origin, self.chunk, strict=True)
        return tuple(min(size, dim - start) for dim, start, size in ends)


def grid_of(dims: tuple[int, ...], chunk: tuple[int, ...]) -> Grid:
    """The grid of a tensor's `dims`, which have an axis more than the dataset's chunks when it is complex."""
    return Grid(dims, chunk + dims[len(chunk) :])


@dataclass(frozen=True)
class Chunks:
    """The place of a dataset whose chunks are all there and unfiltered: patched in place.

    path: the dataset in the HDF5 file. chunk: shape of a chunk.
    load: gives the byte of the file at which each chunk begins, by number; called once.
    base: added to all of them, for an HDF5 file that lies inside another.
    """

    file: str
    path: bytes
    chunk: tuple[int, ...]
    load: Callable[[], Int]
    order: str = "little"
    base: int = 0
    storage: str = field(default="chunked", init=False)
    offset: None = field(default=None, init=False)
    reason: None = field(default=None, init=False)
    patchable: bool = field(default=True, init=False)

    @cached_property
    def starts(self) -> Int:
        """Byte at which each chunk begins."""
        return self.load() + self.base

    def locate(self, dims: tuple[int, ...], layout: BitLayout, flat: Int) -> Iterator[Located]:
        grid = grid_of(dims, self.chunk)
        for first in range(0, len(flat), PART):
            part = slice(first, first + PART)
            number, within = grid.split(flat[part])
            yield Located(self.file, part, self.starts[number] + within * layout.itemsize, self.order)


def stored_chunks(dataset: Any) -> Int:
    """The chunks of a dataset (h5py DatasetID) that are in the file, one row each; one that was never written is not.

    Columns: the index of its first element along each axis, filter mask, byte, size in bytes. All at once, since HDF5
    goes through all chunks to find the one at a given place.
    """
    found = array("q")

    def add(info: Any) -> None:
        found.extend((*info.chunk_offset, info.filter_mask, info.byte_offset, info.size))

    if hasattr(dataset, "chunk_iter"):
        dataset.chunk_iter(add)
    else:  # HDF5 before 1.12.3: slow for very many chunks, as each look-up counts through them
        for index in range(dataset.get_num_chunks()):
            add(dataset.get_chunk_info(index))
    return np.array(found, np.int64).reshape(-1, dataset.rank + 3)


def chunk_starts(dataset: Any, source: Source, userblock: int) -> Int:
    """Where each chunk of an unfiltered dataset (h5py DatasetID) begins in the file, by chunk number.

    Raises CheckpointError: truncated when a chunk reaches past the end, unsupported-storage when addresses don't hold.
    """
    grid = Grid(dataset.shape, dataset.get_create_plist().get_chunk())
    table = stored_chunks(dataset)
    numbers = grid.numbers(table[:, :-3])
    size = math.prod(grid.chunk) * dataset.get_type().get_size()
    fits = len(numbers) == grid.total and np.array_equal(np.sort(numbers), np.arange(grid.total))
    if not fits or (table[:, -1] != size).any():
        raise CheckpointError("header", "the chunk index of a dataset does not fit its shape")
    starts = np.empty(grid.total, np.int64)
    starts[numbers] = table[:, -2]
    starts += _shift(dataset, source, userblock, grid.origin(0), int(starts[0]), size)
    if starts.min() < 0 or starts.max() + size > source.size:
        raise CheckpointError("truncated", f"a chunk of {size} bytes at byte {starts.max()} is not all in the file")
    return starts


def shifts(userblock: int) -> tuple[int, ...]:
    """What may have to be added to chunk addresses, the likelier first.

    HDF5 before 1.14.4 left the userblock out (HDFGroup/hdf5#3003).
    """
    from h5py import version

    old = version.hdf5_version_tuple < (1, 14, 4)
    return (userblock, 0) if old and userblock else (0, userblock) if userblock else (0,)


def _shift(dataset: Any, source: Source, userblock: int, origin: tuple[int, ...], start: int, size: int) -> int:
    """The one of `shifts` with which the chunk at `origin`, said to begin at `start`, is where it should be."""
    if not userblock:
        return 0
    stored = dataset.read_direct_chunk(origin)[1]
    for shift in shifts(userblock):
        if start + shift + size <= source.size and source.read(start + shift, size) == stored:
            return shift
    raise CheckpointError("unsupported-storage", "chunks don't lie at the addresses that HDF5 gives")
