"""The HDF5 superblock: where an HDF5 file begins, where it ends, and whether someone is writing it; no h5py needed."""

from __future__ import annotations

from dataclasses import dataclass

from flipper.checkpoints.source import Source
from flipper.errors import CheckpointError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_FIRST_USERBLOCK = 512
_WRITING = 0x05
"""Consistency flags: bit 0 is open for writing, bit 2 open for SWMR writing."""


@dataclass(frozen=True)
class Superblock:
    """What the file says about itself.

    start: byte of the signature, that is the userblock's size. version: 0 to 3.
    end: byte of the file at which HDF5 believes that it ends. writing: opened for writing and not closed since.
    """

    start: int
    version: int
    end: int
    writing: bool


def find_signature(source: Source) -> int | None:
    """The byte at which the HDF5 signature stands: 0, or 512 doubled some times; None if it is nowhere."""
    start = 0
    while start + len(SIGNATURE) <= source.size:
        if source.read(start, len(SIGNATURE)) == SIGNATURE:
            return start
        start = 2 * start or _FIRST_USERBLOCK
    return None


def read_superblock(source: Source) -> Superblock:
    """Read the superblock; raises CheckpointError: foreign without a signature, truncated, header."""
    start = find_signature(source)
    if start is None:
        raise CheckpointError("foreign", f"{source.path}: there is no HDF5 signature")
    head = source.read(start, min(16, source.size - start)).ljust(16, b"\0")
    version = head[8]
    if version > 3:
        raise CheckpointError("header", f"{source.path}: HDF5 superblock version {version}; known are 0 to 3")
    width = head[13] if version < 2 else head[9]
    if width not in (2, 4, 8):
        raise CheckpointError("header", f"{source.path}: HDF5 addresses of {width} bytes; known are 2, 4 and 8")
    fields = {0: 24, 1: 28}.get(version, 12)
    addresses = source.read(start + fields, 3 * width)
    base = int.from_bytes(addresses[:width], "little")
    end = int.from_bytes(addresses[2 * width :], "little")
    writing = version == 3 and bool(head[11] & _WRITING)
    return Superblock(start, version, end - base + start, writing)  # HDF5 moves the end with a moved userblock
