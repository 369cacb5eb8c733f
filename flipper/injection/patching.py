"""Patching: XOR of bytes in a file, and runs of bytes put in their places."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from flipper.checkpoints.elements import BLOCK, Bytes, Int
from flipper.checkpoints.output import PIECE
from flipper.injection.copying import Way, copy

DENSE = 8
"""Changed bytes a block from which on nearly all of it would be read and written once more after it was copied."""


def copy_patched(source: Path, target: Path, offsets: Int, masks: Bytes) -> None:
    """Make `target`, which exists, a copy of `source` with bytes at `offsets` (ascending, distinct) XORed."""
    # A copy of 2 GiB through our own buffer takes the 0.7 s that the kernel's takes; to patch that took 0.6 s more.
    dense = len(offsets) * BLOCK > DENSE * source.stat().st_size
    shared = copy(source, target, [_altering(offsets, masks)] if dense else ())
    if shared or not dense:
        mode = target.stat().st_mode
        target.chmod(mode | 0o200)  # writable while it is patched
        patch(target, offsets, masks)
        target.chmod(mode)


def _altering(offsets: Int, masks: Bytes) -> Way:
    """The way to copy that XORs the bytes at `offsets` as they pass."""
    buffer = np.empty(PIECE, np.uint8)

    def way(reader: int, writer: int, offset: int, count: int) -> int:
        block = buffer[: os.preadv(reader, [buffer[:count].data], offset)]
        first, last = np.searchsorted(offsets, (offset, offset + len(block)))
        block[offsets[first:last] - offset] ^= masks[first:last]  # distinct offsets, so no flip is lost
        return os.pwrite(writer, block.data, offset) if len(block) else 0

    return way


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
    if len(offsets) == 0:
        return
    # One buffer for all blocks: fresh memory costs more than the patch.
    buffer = np.empty(min(BLOCK, int(offsets[-1] - offsets[0]) + 1), np.uint8)
    edges = (np.flatnonzero(np.diff(offsets // BLOCK)) + 1).tolist()
    for first, last in zip([0, *edges], [*edges, len(offsets)], strict=True):
        start = int(offsets[first])
        block = buffer[: int(offsets[last - 1]) + 1 - start]
        _read(descriptor, block, start)
        block[offsets[first:last] - start] ^= masks[first:last]  # distinct offsets, so no flip is lost
        _write(descriptor, block, start)


def _read(descriptor: int, block: Bytes, offset: int) -> None:
    done = 0
    while done < len(block):
        count = os.preadv(descriptor, [block[done:].data], offset + done)
        if count == 0:
            raise OSError(f"the file ended at byte {offset + done} while it was patched")
        done += count


def _write(descriptor: int, data: Bytes, offset: int) -> None:
    view = data.data
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
