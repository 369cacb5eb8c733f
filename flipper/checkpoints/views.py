"""Views: tensors that lie over the same bytes, told from where they begin and from their strides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from flipper.checkpoints.tensor import Extent, Tensor, run_of

Gap = tuple[int, int]
"""First byte and the one after the last."""

MAP_LIMIT = 1 << 27
"""Bytes of a group of views that are looked at one by one; views in a wider group are taken for overlapping."""

BLOCK = 1 << 18
"""Elements of a view that are looked at together."""


def overlapping(tensors: Sequence[Tensor]) -> list[str]:
    """The names of the tensors that share a byte with another one, or name one of their own twice, as given."""
    names: set[str] = set()
    for cluster in sharing(tensors):
        names.update(tensor.name for tensor in (cluster if all(map(dense, cluster)) else _truly_sharing(cluster)))
    return [tensor.name for tensor in tensors if tensor.name in names]


def sharing(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors whose byte spans overlap, and single tensors of which two elements may be the same bytes."""
    for cluster in _clusters(tensors):
        if len(cluster) > 1 or not injective(cluster[0]):
            yield cluster


def run(tensor: Tensor) -> Extent:
    """Its run of bytes: in a file, or inside a deflated archive entry; only for tensors that `sharing` gives."""
    found = run_of(tensor.place)
    assert found is not None
    return found[1]


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Elements to step along each of its dims."""
    stored = run(tensor).strides
    return row_major(tensor) if stored is None else stored


def row_major(tensor: Tensor) -> tuple[int, ...]:
    """The strides that it would have if it were row-major."""
    return tuple(math.prod(tensor.dims[axis + 1 :]) for axis in range(len(tensor.dims)))


def span(tensor: Tensor) -> Gap:
    """First byte and the one after the last that its elements touch."""
    extent = run(tensor)
    start = extent.start
    if extent.strides is None:
        return start, start + tensor.nbytes
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.dims, extent.strides, strict=True))
    return start, start + (reach * tensor.layout.width + 7) // 8


def injective(tensor: Tensor) -> bool:
    """Whether no two elements share a byte, told from the strides (sufficient, and true of every ordinary view)."""
    if run(tensor).strides is None:
        return True
    reach = 1
    for stride, size in sorted(zip(strides(tensor), tensor.dims, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return True


def dense(tensor: Tensor) -> bool:
    """Whether its elements are all the bytes of its span, each once."""
    start, stop = span(tensor)
    return injective(tensor) and stop - start == tensor.nbytes


def _clusters(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors whose byte spans overlap, each in the order given."""
    spans = []
    for index, tensor in enumerate(tensors):
        found = run_of(tensor.place)
        if found is not None and tensor.elements:
            spans.append((found[0], *span(tensor), index))
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


def _truly_sharing(cluster: Sequence[Tensor]) -> list[Tensor]:
    """Those of a group that do overlap: every second element from 0 and from 1 are two views without a common byte."""
    low = min(span(tensor)[0] for tensor in cluster)
    high = max(span(tensor)[1] for tensor in cluster)
    if high - low > MAP_LIMIT or len(cluster) > np.iinfo(np.uint16).max:
        return list(cluster)
    owner = np.zeros(high - low, np.uint16)
    found = {index for index, tensor in enumerate(cluster, 1) if not injective(tensor)}
    for index, tensor in enumerate(cluster, 1):
        width = -(-tensor.layout.width // 8)
        for first in range(0, tensor.elements, BLOCK):
            flat = np.arange(first, min(first + BLOCK, tensor.elements), dtype=np.int64)
            (part,) = run(tensor).locate(tensor.dims, tensor.layout, flat)
            octets = (part.offsets - low)[:, None] + np.arange(width)
            before = set(np.unique(owner[octets]).tolist()) - {0, index}
            if before:
                found |= {*before, index}
            owner[octets] = index
    return [cluster[index - 1] for index in sorted(found)]
