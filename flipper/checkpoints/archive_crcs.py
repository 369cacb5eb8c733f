"""Archive CRCs: keep the checksums of zip entries in step with a change, and check them against the data."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from flipper.checkpoints.archives import STORED, Archive, Entry
from flipper.checkpoints.crc import Words, crc_changes
from flipper.checkpoints.elements import Bytes, Int
from flipper.checkpoints.inflate import inflated
from flipper.errors import CheckpointError, printable

BLOCK = 4 << 20
"""Bytes that are checked together."""


def without_crcs(archive: Archive) -> frozenset[str]:
    """The names of the entries that have no CRC: torch can be told to store zeros, which have to stay.

    Other programs may have added entries that have one. A true CRC is zero once in four thousand million times, so
    several of them mean that there are none.
    """
    zeros = [entry.name for entry in archive.entries if entry.size and not entry.crc]
    return frozenset(zeros if len(zeros) > 1 else ())


def crc_masks(archives: Sequence[tuple[int, Archive]], offsets: Int, masks: Bytes) -> tuple[Int, Bytes]:
    """The bytes of a file to XOR so that the CRCs of its archives follow a change: ascending offsets, and masks.

    archives: each with the byte of the file where it begins, ascending. offsets, masks: the bytes that change,
    ascending and distinct. A CRC that was wrong before stays wrong.
    """
    slots: list[list[int]] = []  # of each changed entry: where the file has its CRC
    changes = crc_changes(_messages(archives, offsets, masks, slots))
    return _slot_masks(slots, changes)


def _messages(
    archives: Sequence[tuple[int, Archive]], offsets: Int, masks: Bytes, slots: list[list[int]]
) -> Iterator[tuple[Int, Bytes]]:
    """Each changed entry that has a CRC, as crc_changes wants it; adds the places of the CRC to `slots`."""
    for base, archive in archives:
        first, last = np.searchsorted(offsets, [base, base + archive.source.size]).tolist()
        if first == last:
            continue
        unchecked = without_crcs(archive)
        for entry, start, stop, distance in _entries_at(archive, offsets[first:last] - base):
            if entry.name not in unchecked:
                slots.append([base + slot for slot in archive.crc_slots(entry)])
                yield distance, masks[first + start : first + stop]
        archive.source.close()  # there may be more archives than files that can be open


def _entries_at(archive: Archive, offsets: Int) -> Iterator[tuple[Entry, int, int, Int]]:
    """The entries that hold some of the offsets: which ones, and how many bytes of the entry follow each."""
    edges = np.searchsorted(offsets, [entry.header for entry in archive.entries]).tolist()
    for entry, (first, last) in zip(archive.entries, pairwise([*edges, len(offsets)]), strict=True):
        if first == last:
            continue
        begin = archive.data_start(entry)
        start, stop = (first + np.searchsorted(offsets[first:last], [begin, begin + entry.packed])).tolist()
        if entry.method == STORED and start < stop:
            yield entry, start, stop, begin + entry.packed - 1 - offsets[start:stop]


def _slot_masks(slots: Sequence[Sequence[int]], changes: Words) -> tuple[Int, Bytes]:
    places = np.array([slot for found in slots for slot in found], np.int64)[:, None] + np.arange(4)
    masks = changes.repeat([len(found) for found in slots]).astype("<u4").view(np.uint8)
    flat = places.reshape(-1)
    rank = np.argsort(flat, kind="stable")
    return flat[rank], masks[rank]


def problems(archive: Archive) -> Iterator[str]:
    """What is wrong with the entries: local headers that don't fit, stored CRCs that differ from that of the data."""
    unchecked = without_crcs(archive)
    for entry in archive.entries:
        try:
            archive.data_start(entry)
            if entry.name not in unchecked:
                yield from _wrong_crcs(archive, entry)
        except CheckpointError as error:
            yield str(error)


def _wrong_crcs(archive: Archive, entry: Entry) -> Iterator[str]:
    crc = data_crc(archive, entry)
    stored = {entry.crc} | {int.from_bytes(archive.source.read(slot, 4), "little") for slot in archive.crc_slots(entry)}
    if stored != {crc}:
        seen = ", ".join(f"{value:#010x}" for value in sorted(stored))
        yield f"{archive.source.path}: {printable(entry.name)}: the stored CRC is {seen}, that of its bytes {crc:#010x}"


def data_crc(archive: Archive, entry: Entry) -> int:
    """The CRC of an entry's content, streamed."""
    source, start = archive.source, archive.data_start(entry)
    if entry.method != STORED:
        source, start = inflated(archive, entry), 0
    crc = 0
    for first in range(0, entry.size, BLOCK):
        crc = zlib.crc32(source.read(start + first, min(BLOCK, entry.size - first)), crc)
    return crc
