"""Elements and bytes: gather elements as numbers from a file, and turn a change of elements into byte masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from flipper.bits import BitLayout
from flipper.bits.layout import Bits
from flipper.checkpoints.source import Source

Int = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK = 1 << 20
"""Bytes looked at together: far-apart elements are read alone, crowded ones a block at a time."""


def gather(source: Source, offsets: Int, layout: BitLayout, order: str, shifts: Int | None = None) -> Bits:
    """The elements at byte `offsets`, as numbers (uint64, same order as `offsets`).

    order: "little" or "big". shifts: first bit in the first byte, for packed dtypes.
    """
    bits = np.zeros(len(offsets), np.uint64)
    if len(offsets) == 0:
        return bits
    rank = None if np.all(offsets[1:] >= offsets[:-1]) else np.argsort(offsets, kind="stable")
    ascending = offsets if rank is None else offsets[rank]
    edges = np.flatnonzero(np.diff(ascending // BLOCK)) + 1
    span = _span(layout)
    # One buffer for all blocks: fresh memory costs more than the reading.
    buffer = np.empty(min(BLOCK, int(ascending[-1] - ascending[0])) + 8, np.uint8)
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(ascending)], strict=True):
        here = ascending[first:last]
        start, end = int(here[0]), min(int(here[-1]) + span, source.size)
        block = buffer[: int(here[-1]) + span - start]
        source.read_into(start, block[: end - start].data)
        block[end - start :] = 0  # a packed dtype may end before its last element's second byte
        bits[first:last] = _assemble(block, here - start, layout, order)
    if rank is not None:
        unsorted = np.empty_like(bits)
        unsorted[rank] = bits
        bits = unsorted
    if shifts is not None:
        bits = (bits >> shifts.astype(np.uint64)) & np.uint64((1 << layout.width) - 1)
    return bits


def contiguous_bits(data: bytes, layout: BitLayout, order: str) -> Bits:
    """All elements of a row-major run of bytes, as numbers; packed dtypes low bits first."""
    if layout.packed:
        stream = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        count = len(stream) // layout.width
        digits = stream[: count * layout.width].reshape(count, layout.width).astype(np.uint64)
        return digits @ (np.uint64(1) << np.arange(layout.width, dtype=np.uint64))
    code = "<" if order == "little" else ">"
    return np.frombuffer(data, f"{code}u{layout.itemsize}").astype(np.uint64)


def byte_masks(offsets: Int, xor: Bits, layout: BitLayout, order: str, shifts: Int | None) -> tuple[Int, Bytes]:
    """The bytes that change when the elements at `offsets` are XORed with `xor`: offsets and masks, unsorted."""
    if shifts is not None:
        xor = xor << shifts.astype(np.uint64)
    code = "<" if order == "little" else ">"
    unit = layout.itemsize or 2  # a packed element's two bytes, of which the second may be none of its own
    octets = xor.astype(f"{code}u{unit}", copy=False).view(np.uint8)
    struck = np.flatnonzero(octets != 0)  # which numpy finds several times faster among booleans
    places = offsets[struck >> (unit.bit_length() - 1)]
    places += struck & (unit - 1)
    return places, octets[struck]


def combine(offsets: Int, masks: Bytes) -> tuple[Int, Bytes]:
    """Ascending offsets, each once, with the XOR of all its masks; bytes that stay as they are drop out."""
    if np.any(offsets[1:] < offsets[:-1]):
        rank = np.argsort(offsets, kind="stable")
        offsets, masks = offsets[rank], masks[rank]
    if np.any(offsets[1:] == offsets[:-1]):
        starts = np.flatnonzero(np.concatenate(([True], offsets[1:] != offsets[:-1])))
        offsets, masks = offsets[starts], np.bitwise_xor.reduceat(masks, starts)
    if masks.all():
        return offsets, masks
    changed = masks != 0
    return offsets[changed], masks[changed]


def _span(layout: BitLayout) -> int:
    """Bytes that hold one element; a packed 6-bit element may lie in two."""
    return layout.itemsize or (1 if 8 % layout.width == 0 else 2)


def _assemble(block: Bytes, starts: Int, layout: BitLayout, order: str) -> Bits:
    """The elements that begin at bytes `starts` of a block."""
    if layout.itemsize and not np.any(starts & (layout.itemsize - 1)):
        code = "<" if order == "little" else ">"
        words = block[: len(block) // layout.itemsize * layout.itemsize].view(f"{code}u{layout.itemsize}")
        found: Bits = words[starts >> (layout.itemsize.bit_length() - 1)]
        return found
    span = _span(layout)
    bits = np.zeros(len(starts), np.uint64)
    for index in range(span):
        step = index if order == "little" else span - 1 - index
        bits |= block[starts + step].astype(np.uint64) << np.uint64(8 * index)
    return bits
