"""Encoding HDF5 chunks: through the same filters as before, in the same size as before where that can be had."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from flipper.checkpoints.elements import Bytes

DEFLATE, FLETCHER32 = 1, 3
"""HDF5 filter numbers."""
ONLY_ONCE = frozenset({32017, 32024})
"""SZ and SZ3: they refuse, loudly, the options of a dataset that they have set up before."""

CHUNK = b"chunk"
"""The scratch dataset."""

_SERIAL = count()


@dataclass(frozen=True)
class Stored:
    """A chunk as it lies in the file: filters whose bit is set in `skipped` were not applied to `data`."""

    skipped: int
    data: bytes


def put_chunk(dataset: Any, origin: tuple[int, ...], new: Stored, held: tuple[int, int]) -> None:
    """Make `new` the chunk of an h5py DatasetID at `origin`. held: filter mask and size of the one that is there.

    HDF5 keeps the mask of the chunk that was there when the new one has its size, whatever mask it is given (seen in
    2.0, all kinds of chunk index); so the chunk gets another size in between.
    """
    if held[0] != new.skipped and held[1] == len(new.data):
        dataset.write_direct_chunk(origin, new.data + b"\0", new.skipped)
    dataset.write_direct_chunk(origin, new.data, new.skipped)


@dataclass(frozen=True)
class Pipeline:
    """A scratch dataset in memory with one chunk and the filters of another dataset, to encode and decode chunks.

    file: h5py.File that holds it. filters: their numbers, in the order in which they encode.
    """

    file: Any
    filters: tuple[int, ...]

    @property
    def skip_all(self) -> int:
        """The mask that says that no filter was applied."""
        return (1 << len(self.filters)) - 1

    def decode(self, stored: Stored, size: int) -> Bytes | None:
        """The `size` bytes that a stored chunk stands for; None if the filters don't accept it."""
        from h5py import h5s

        decoded = np.zeros(size, np.uint8)
        try:
            dataset = self._open()
            held = dataset.get_chunk_info_by_coord((0,) * dataset.rank)
            put_chunk(dataset, (0,) * dataset.rank, stored, (held.filter_mask, held.size))
            del dataset  # an open dataset goes on with the filter mask that the chunk had before (HDF5 2.0)
            dataset = self._open()
            dataset.read(h5s.ALL, h5s.ALL, decoded, dataset.get_type())
        except (OSError, RuntimeError, ValueError):
            return None
        return decoded

    def encode(self, data: Bytes) -> Stored | None:
        """`data` through the filters; None if they can't encode it."""
        from h5py import h5s

        try:
            dataset = self._open()
            dataset.write(h5s.ALL, h5s.ALL, data, dataset.get_type())
            skipped, encoded = dataset.read_direct_chunk((0,) * dataset.rank)
        except (OSError, RuntimeError, ValueError):
            return None
        return Stored(skipped, bytes(encoded))

    def _open(self) -> Any:
        from h5py import h5d

        return h5d.open(self.file.id, CHUNK)

    def encoding(self, data: Bytes, old: Stored) -> Stored:
        """`data` as it is best stored: in the size of `old` if that can be had, else as the filters like it.

        A lossy filter would change other elements with the struck one: then no filter is applied.
        """
        made = None if old.skipped == self.skip_all else self.encode(data)
        if made is not None:
            squeezed = self._squeezed(made, len(old.data)) if made.skipped == old.skipped else None
            for choice in (squeezed, made):
                if choice is not None and self._exact(choice, data):
                    return choice
        return Stored(self.skip_all, data.tobytes())

    def with_checksum_of(self, old: Stored, new: Stored) -> Stored:
        """`new` with the Fletcher-32 checksum of `old`, if both end with one."""
        last = len(self.filters) - 1
        if self.filters[last:] != (FLETCHER32,) or (old.skipped | new.skipped) & 1 << last:
            return new
        return Stored(new.skipped, new.data[:-4] + old.data[-4:])

    def _exact(self, stored: Stored, data: Bytes) -> bool:
        decoded = self.decode(stored, len(data))
        return decoded is not None and np.array_equal(decoded, data)

    def _squeezed(self, made: Stored, room: int) -> Stored | None:
        """`made` in exactly `room` bytes: as it is, or deflated otherwise and padded, which inflate doesn't mind."""
        if len(made.data) == room:
            return made
        checked = self.filters[-1:] == (FLETCHER32,)
        last = len(self.filters) - 1 - checked
        if last < 0 or self.filters[last] != DEFLATE or made.skipped & 1 << last:
            return None
        tail = 4 * checked
        packed: bytes | None = made.data[: len(made.data) - tail]
        if packed is not None and len(packed) + tail > room:
            packed = _deflated(zlib.decompress(packed), room - tail)
        if packed is None:
            return None
        padded = packed.ljust(room - tail, b"\0")
        return Stored(made.skipped, _fletchered(padded) if checked else padded)


def _deflated(plain: bytes, room: int) -> bytes | None:
    """`plain` deflated in at most `room` bytes; None if zlib can't."""
    for level, memory in ((4, 8), (6, 8), (9, 8), (9, 9)):
        packer = zlib.compressobj(level, memLevel=memory)
        packed = packer.compress(plain) + packer.flush()
        if len(packed) <= room:
            return packed
    return None


@contextmanager
def pipeline(dataset: Any) -> Iterator[Pipeline | None]:
    """The filters of a chunked dataset (h5py DatasetID) in memory; None if it has none or HDF5 refuses."""
    from h5py import h5d, h5s

    plist = dataset.get_create_plist()
    filters = _filters(plist)
    if plist.get_layout() != h5d.CHUNKED or ONLY_ONCE.intersection(code for code, *_ in filters):
        yield None
        return
    with _memory_file() as file:
        try:
            space = h5s.create_simple(plist.get_chunk())
            made = h5d.create(file.id, CHUNK, dataset.get_type().copy(), space, plist)
        except (OSError, RuntimeError, ValueError):
            made = None
        if made is None or _filters(made.get_create_plist()) != filters:  # some set up options anew, and differently
            yield None
        else:
            del made
            yield Pipeline(file, tuple(code for code, *_ in filters))


def _filters(plist: Any) -> list[tuple[Any, ...]]:
    """Number, flags, options and name of each filter, in the order in which they encode."""
    return [plist.get_filter(index) for index in range(plist.get_nfilters())]


@contextmanager
def _memory_file() -> Iterator[Any]:
    import h5py

    name = f"flipper-scratch-{next(_SERIAL)}"  # two at a time must not be called the same
    with h5py.File(name, "w", driver="core", backing_store=False, rdcc_nbytes=0) as file:
        yield file


def _fletchered(data: bytes) -> bytes:
    """`data` with the Fletcher-32 checksum that HDF5 puts behind it."""
    with _memory_file() as file:
        made = file.create_dataset("bytes", shape=(len(data),), dtype="u1", chunks=(len(data),), fletcher32=True)
        made[...] = np.frombuffer(data, np.uint8)
        return bytes(made.id.read_direct_chunk((0,))[1])
