"""Patching: XOR of bytes in a file, sparse by position or dense in one pass with the copy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from flipper.checkpoints.elements import BLOCK, Bytes, Int
from flipper.injection.copying import BUFFER, clone, copy

DENSE = 10_000
"""Changed bytes per GB beyond which copying and patching go in one pass: page faults then cost more than the copy."""


def copy_patched(source: Path, target: Path, offsets: Int, masks: Bytes) -> None:
    """Make `target`, which exists, a copy of `source` with bytes at `offsets` (ascending, distinct) XORed."""
    size = source.stat().st_size
    if len(offsets) * 1e9 <= DENSE * max(size, BUFFER):
        copy(source, target)
        mode = target.stat().st_mode
        target.chmod(mode | 0o200)  # writable while it is patched
        patch(target, offsets, masks)
        target.chmod(mode)
        return
    with open(source, "rb", buffering=0) as reader, open(target, "r+b", buffering=0) as writer:
        os.fchmod(writer.fileno(), os.fstat(reader.fileno()).st_mode & 0o777)
        if clone(reader.fileno(), writer.fileno()):
            _patch(writer.fileno(), offsets, masks)
        else:
            _stream(reader.fileno(), writer.fileno(), offsets, masks)


def patch(path: Path, offsets: Int, masks: Bytes, sync: bool = False) -> None:
    """XOR the bytes at `offsets` (ascending, distinct) of a file with `masks`."""
    with open(path, "r+b", buffering=0) as file:
        _patch(file.fileno(), offsets, masks)
        if sync:
            os.fsync(file.fileno())


def write_runs(path: Path, runs: Iterable[tuple[int, bytes]], size: int | None = None) -> None:
    """Write runs of bytes at their places, cut the file at `size` if given, and flush it to the disk."""
    with open(path, "r+b", buffering=0) as file:
        for offset, data in runs:
            _write(file.fileno(), np.frombuffer(data, np.uint8), offset)
        if size is not None:
            file.truncate(size)
        os.fsync(file.fileno())


def _patch(descriptor: int, offsets: Int, masks: Bytes) -> None:
    """Read, XOR and write back, block by block, from the first changed byte of a block to its last."""
    edges = (np.flatnonzero(np.diff(offsets // BLOCK)) + 1).tolist()
    for first, last in zip([0, *edges], [*edges, len(offsets)], strict=True):
        if first == last:
            continue
        start = int(offsets[first])
        block = np.frombuffer(_read(descriptor, int(offsets[last - 1]) + 1 - start, start), np.uint8).copy()
        block[offsets[first:last] - start] ^= masks[first:last]  # distinct offsets, so no flip is lost
        _write(descriptor, block, start)


def _stream(reader: int, writer: int, offsets: Int, masks: Bytes) -> None:
    buffer = np.empty(BUFFER, np.uint8)
    position = 0
    while count := os.preadv(reader, [buffer.data], position):
        first, last = np.searchsorted(offsets, [position, position + count])
        buffer[offsets[first:last] - position] ^= masks[first:last]
        _write(writer, buffer[:count], position)
        position += count
    os.ftruncate(writer, position)


def _read(descriptor: int, count: int, offset: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.pread(descriptor, count - len(data), offset + len(data))
        if not piece:
            raise OSError(f"the file ended at byte {offset + len(data)} while it was patched")
        data += piece
    return data


def _write(descriptor: int, data: Bytes, offset: int) -> None:
    view = data.data
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
