"""Views that overlap: which elements of which tensor count, so that every byte is in a population once."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flipper.checkpoints.elements import Int
from flipper.checkpoints.tensor import Tensor
from flipper.checkpoints.views import BLOCK, Gap, dense, row_major, run, sharing, span, strides
from flipper.errors import CheckpointError
from flipper.faults.taken import first_occurrences

SELF_OVERLAP_LIMIT = 8
"""A view may name each element of its storage this often before it is refused rather than listed element by element."""

_Map = np.ndarray[tuple[int], np.dtype[np.bool_]]


def distinct_elements(tensors: Sequence[Tensor]) -> dict[str, Int]:
    """For each tensor that shares bytes with another, or with itself: the flat indexes that count as its own.

    tensors: by name. Bytes go to the tensor with the widest elements, among these to the first; so no byte of an
    element is taken away alone, as the elements of all views are aligned to their width.
    Tensors that share nothing are left out of the result.
    """
    found: dict[str, Int] = {}
    for cluster in sharing(tensors):
        found.update(_share_out(sorted(cluster, key=lambda tensor: -tensor.layout.width)))
    return found


def _share_out(cluster: Sequence[Tensor]) -> dict[str, Int]:
    """Each byte goes to the first tensor that has it; an element counts where all its bytes are its tensor's own."""
    taken = _Intervals()
    shares: dict[str, Int] = {}
    for index, tensor in enumerate(cluster):
        gaps = taken.gaps(*span(tensor))
        whole = gaps == [span(tensor)]
        if not gaps:
            shares[tensor.name] = np.zeros(0, np.int64)
        elif whole and dense(tensor):
            taken.add(*gaps[0])
        elif dense(tensor) and strides(tensor) == row_major(tensor):
            shares[tensor.name] = _claim_gaps(tensor, gaps, taken)
        else:
            return shares | _share_out_bytes(cluster[index:], taken)
    return shares


class _Intervals:
    """Bytes that are taken, as disjoint intervals."""

    def __init__(self) -> None:
        self.all: list[Gap] = []

    def add(self, start: int, stop: int) -> None:
        """Take bytes that are free."""
        insort(self.all, (start, stop))

    def gaps(self, start: int, stop: int) -> list[Gap]:
        """What is free between two bytes."""
        found = []
        index = max(bisect_right(self.all, (start, start)) - 1, 0)
        while start < stop and index < len(self.all) and self.all[index][0] < stop:
            first, last = self.all[index]
            if first > start:
                found.append((start, first))
            start = max(start, last)
            index += 1
        return [*found, (start, stop)] if start < stop else found


def _claim_gaps(tensor: Tensor, gaps: Sequence[Gap], taken: _Intervals) -> Int:
    """The elements of a row-major tensor that lie in free bytes; takes their bytes."""
    origin, width = span(tensor)[0], tensor.layout.width
    ranges = [np.zeros(0, np.int64)]
    for start, stop in gaps:
        first, last = -((origin - start) * 8 // width), min((stop - origin) * 8 // width, tensor.elements)
        if first < last:
            ranges.append(np.arange(first, last, dtype=np.int64))
            taken.add(origin + first * width // 8, origin + (last * width + 7) // 8)
    return np.concatenate(ranges)


def _share_out_bytes(cluster: Sequence[Tensor], intervals: _Intervals) -> dict[str, Int]:
    """The same by a map of all bytes, for views of any strides."""
    low = min(span(tensor)[0] for tensor in cluster)
    high = max(span(tensor)[1] for tensor in cluster)
    taken = np.zeros(high - low, np.bool_)
    for first, last in intervals.all:
        taken[max(first - low, 0) : max(last - low, 0)] = True
    return {tensor.name: _claim(tensor, taken, low) for tensor in cluster}


def _claim(tensor: Tensor, taken: _Map, low: int) -> Int:
    """The elements none of whose bytes are taken, first index first; takes their bytes."""
    width = tensor.layout.width
    # Neighbours of a packed dtype share a byte and still are two elements: their bytes are taken together.
    block = _candidate_count(tensor) if tensor.layout.packed else BLOCK
    own = [np.zeros(0, np.int64)]
    for flat in _candidates(tensor, max(block, 1)):
        (part,) = run(tensor).locate(tensor.dims, tensor.layout, flat)
        first = (part.offsets - low) * 8 + (0 if part.shifts is None else part.shifts)
        free = first_occurrences(first.astype(np.uint64))
        for byte in _bytes_of(first, width):
            free &= ~taken[byte]
        for byte in _bytes_of(first[free], width):
            taken[byte] = True
        own.append(flat[free])
    return np.concatenate(own)


def _bytes_of(first_bits: Int, width: int) -> Iterator[Int]:
    """The first, second, ... byte of elements; the last again where an element has fewer than others."""
    last = (first_bits + (width - 1)) // 8
    for index in range((width + 14) // 8):
        yield np.minimum(first_bits // 8 + index, last)


def _candidate_sizes(tensor: Tensor) -> tuple[int, ...]:
    return tuple(1 if stride == 0 else n for n, stride in zip(tensor.dims, strides(tensor), strict=True))


def _candidate_count(tensor: Tensor) -> int:
    return math.prod(_candidate_sizes(tensor))


def _candidates(tensor: Tensor, block: int) -> Iterator[Int]:
    """Flat indexes that can be the first of their element, ascending: index 0 along every expanded (stride 0) axis."""
    sizes, count = _candidate_sizes(tensor), _candidate_count(tensor)
    start, stop = span(tensor)
    if count * tensor.layout.width > 8 * SELF_OVERLAP_LIMIT * (stop - start):
        raise CheckpointError(
            "unsupported-storage", f"the view {tensor.name} overlaps itself too often; leave it out by --exclude"
        )
    for first in range(0, count, block):
        within: Any = np.arange(first, min(first + block, count), dtype=np.int64)
        if sizes:
            within = np.ravel_multi_index(np.unravel_index(within, sizes), tensor.dims).astype(np.int64)
        yield within
