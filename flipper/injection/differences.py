"""Differences: the runs of bytes in which two files differ, streamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flipper.checkpoints.elements import Bytes, Int
from flipper.injection.manifest import Patch

BLOCK = 4 << 20

JOINED = 16
"""Equal bytes between two differences up to which they are one run."""


def differing_runs(before: Path, after: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Offset, bytes before, bytes after of each run that differs; past the end of a shorter file there are none."""
    with open(before, "rb", buffering=0) as one, open(after, "rb", buffering=0) as other:
        offset = 0
        while True:
            left, right = one.read(BLOCK), other.read(BLOCK)
            if not left and not right:
                return
            common = min(len(left), len(right))
            if left[:common] != right[:common]:
                yield from runs(offset, left[:common], right[:common])
            if len(left) != len(right):
                yield offset + common, left[common:], right[common:]
            offset += max(len(left), len(right))


def differing_bytes(before: Path, after: Path) -> Iterator[tuple[int, int, Int, Bytes]]:
    """Block by block of two files of one size: its bounds, the offsets of its bytes that differ, and their XOR."""
    with open(before, "rb", buffering=0) as one, open(after, "rb", buffering=0) as other:
        offset = 0
        while left := one.read(BLOCK):
            xor = np.frombuffer(left, np.uint8) ^ np.frombuffer(other.read(len(left)), np.uint8)
            places = np.flatnonzero(xor)
            yield offset, offset + len(left), places + offset, xor[places]
            offset += len(left)


def patches_between(file: str, before: Path, after: Path) -> tuple[Patch, ...]:
    """The same runs as patches of the file that a manifest calls `file`."""
    return tuple(Patch(file, *run) for run in differing_runs(before, after))


def runs(offset: int, left: bytes, right: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Offset, bytes before, bytes after of each run in which two blocks of one size differ; `offset` is theirs."""
    places = np.flatnonzero(np.frombuffer(left, np.uint8) != np.frombuffer(right, np.uint8))
    edges = np.flatnonzero(np.diff(places) > JOINED) + 1
    for run in np.split(places, edges):
        first, last = int(run[0]), int(run[-1]) + 1
        yield offset + first, left[first:last], right[first:last]
