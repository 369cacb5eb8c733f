"""Views that overlap: which elements of which tensor count, so that every byte is in a population once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from flipper.checkpoints.elements import Int
from flipper.checkpoints.tensor import Extent, Tensor, run_of
from flipper.errors import CheckpointError

SELF_OVERLAP_LIMIT = 8
"""A view may name each element of its storage this often before it is refused rather than listed element by element."""


def distinct_elements(tensors: Sequence[Tensor]) -> dict[str, Int]:
    """For each tensor that shares bytes with another, or with itself: the flat indexes that count as its own.

    tensors: in the order in which they take precedence. Tensors that share nothing are left out of the result.
    """
    found: dict[str, Int] = {}
    for cluster in _clusters(tensors):
        if len(cluster) > 1 or not _injective(cluster[0]):
            found.update(_share_out(cluster))
    return found


def _clusters(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors whose byte spans overlap, each in the order given."""
    spans = []
    for index, tensor in enumerate(tensors):
        run = run_of(tensor.place)
        if run is not None and tensor.elements:
            spans.append((run[0], *_span(tensor), index))
    spans.sort()
    cluster: list[int] = []
    current, end = ("", ""), 0
    for space, start, stop, index in spans:
        if cluster and (space != current or start >= end):
            yield [tensors[i] for i in sorted(cluster)]
            cluster, end = [], 0
        cluster.append(index)
        current, end = space, max(end, stop)
    if cluster:
        yield [tensors[i] for i in sorted(cluster)]


def _run(tensor: Tensor) -> Extent:
    run = run_of(tensor.place)
    assert run is not None
    return run[1]


def _strides(tensor: Tensor) -> tuple[int, ...]:
    strides = _run(tensor).strides
    if strides is not None:
        return strides
    return tuple(math.prod(tensor.dims[axis + 1 :]) for axis in range(len(tensor.dims)))


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and the one after the last that its elements touch."""
    start = _run(tensor).start
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.dims, _strides(tensor), strict=True))
    return start, start + (reach * tensor.layout.width + 7) // 8


def _injective(tensor: Tensor) -> bool:
    """Whether no two elements share a byte, told from the strides (sufficient, and true of every ordinary view)."""
    reach = 1
    for stride, size in sorted(zip(_strides(tensor), tensor.dims, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return True


def _dense(tensor: Tensor) -> bool:
    start, stop = _span(tensor)
    return _injective(tensor) and stop - start == tensor.nbytes


def _share_out(cluster: Sequence[Tensor]) -> dict[str, Int]:
    """Each byte goes to the first tensor that has it; an element counts where all its bytes are its tensor's own."""
    low = min(_span(tensor)[0] for tensor in cluster)
    high = max(_span(tensor)[1] for tensor in cluster)
    whole: list[tuple[int, int]] = []
    taken: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None
    shares: dict[str, Int] = {}
    for tensor in cluster:
        start, stop = _span(tensor)
        if any(first <= start and stop <= last for first, last in whole):
            shares[tensor.name] = np.zeros(0, np.int64)
            continue
        if _dense(tensor) and taken is None and not any(first < stop and start < last for first, last in whole):
            whole.append((start, stop))
            continue
        if taken is None:
            taken = np.zeros(high - low, np.bool_)
            for first, last in whole:
                taken[first - low : last - low] = True
        shares[tensor.name] = _claim(tensor, taken, low)
    return shares


def _claim(tensor: Tensor, taken: np.ndarray[tuple[int], np.dtype[np.bool_]], low: int) -> Int:
    """The elements none of whose bytes are taken, first index first; takes their bytes."""
    flat = _candidates(tensor)
    (part,) = _run(tensor).locate(tensor.dims, tensor.layout, flat)
    first = part.offsets - low
    if not tensor.layout.packed:  # neighbours of a packed dtype share a byte and still are two elements
        rank = np.argsort(first, kind="stable")
        once = np.sort(rank[np.concatenate(([True], np.diff(first[rank]) != 0))])
        flat, first = flat[once], first[once]
    size = tensor.layout.itemsize or 1
    free = np.ones(len(flat), np.bool_)
    for index in range(size):
        free &= ~taken[first + index]
    for index in range(size):
        taken[first[free] + index] = True
    return np.sort(flat[free])


def _candidates(tensor: Tensor) -> Int:
    """Flat indexes that can be the first of their element: index 0 along every expanded (stride 0) axis."""
    strides = _strides(tensor)
    sizes = tuple(1 if stride == 0 else size for size, stride in zip(tensor.dims, strides, strict=True))
    start, stop = _span(tensor)
    if math.prod(sizes) * tensor.layout.width > 8 * SELF_OVERLAP_LIMIT * (stop - start):
        raise CheckpointError(
            "unsupported-storage", f"the view {tensor.name} overlaps itself too often; leave it out by --exclude"
        )
    index = np.unravel_index(np.arange(math.prod(sizes), dtype=np.int64), sizes)
    flat: Int = np.ravel_multi_index(index, tensor.dims).astype(np.int64) if sizes else np.zeros(1, np.int64)
    return flat
