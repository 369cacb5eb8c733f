"""DCP pieces: the place of a tensor whose chunks are saved apart, each as an archive of its own inside some file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from flipper.bits import BitLayout
from flipper.checkpoints import pytorch, safetensors
from flipper.checkpoints.archives import Archive
from flipper.checkpoints.elements import Int
from flipper.checkpoints.source import Source
from flipper.checkpoints.tensor import Extent, Located, Tensor
from flipper.errors import CheckpointError


@dataclass(frozen=True, order=True)
class Item:
    """Bytes [start, start + size) of a file: one saved chunk or object."""

    file: str
    start: int
    size: int


class Items:
    """Opens items when they are asked for. sources: the files by relative name."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self.sources = sources
        self._archives: dict[Item, Archive | None] = {}
        self._extents: dict[tuple[Item, str], Extent] = {}
        self._files: dict[str, tuple[Tensor, ...]] = {}

    def archive(self, item: Item) -> Archive | None:
        """The torch.save archive that an item is; None when it is something else."""
        if item not in self._archives:
            window = self.sources[item.file].window(item.start, item.size)
            self._archives[item] = Archive(window) if window.head(4) == b"PK\3\4" else None
            window.close()
        return self._archives[item]

    def extent(self, item: Item, name: str, dtype: str, shape: tuple[int, ...]) -> Extent:
        """Where the bytes of the one tensor in an item lie, in the file.

        Raises CheckpointError when the item holds something else than a tensor of that dtype and shape.
        """
        found = self._extents.get((item, name))
        if found is None:
            tensor = self._tensor(item, name)
            if not isinstance(tensor.place, Extent):
                reason = tensor.place.reason or tensor.place.storage
                raise CheckpointError("unsupported-storage", f"{self._where(item)}: {reason}")
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                seen = f"{tensor.dtype}{list(tensor.shape)}, .metadata says {dtype}{list(shape)} for {name}"
                raise CheckpointError("header", f"{self._where(item)} holds {seen}")
            found = replace(tensor.place, file=item.file, start=tensor.place.start + self._base(item))
            self._extents[item, name] = found
        return found

    def _base(self, item: Item) -> int:
        """The byte of the file in which an item's places count: torch notes no place in a file of safetensors."""
        return 0 if self.archive(item) is None else item.start

    def _where(self, item: Item) -> str:
        return f"{self.sources[item.file].path}: the item at byte {item.start}"

    def _safetensors(self, file: str) -> tuple[Tensor, ...]:
        if file not in self._files:
            self._files[file] = tuple(safetensors.read_tensors(self.sources[file]))
        return self._files[file]

    def _tensor(self, item: Item, name: str) -> Tensor:
        archive = self.archive(item)
        if archive is not None:
            tensors = pytorch.read(archive).tensors
            archive.source.close()
        else:
            tensors = self._safetensors(item.file)
        named: Sequence[Tensor] = [tensor for tensor in tensors if tensor.name == name] if len(tensors) > 1 else tensors
        if len(named) != 1:
            raise CheckpointError("header", f"{self._where(item)} holds {len(tensors)} tensors, none is {name}")
        return named[0]


@dataclass(frozen=True)
class Piece:
    """One chunk of a tensor: the block [offsets, offsets + sizes) of it, and the item that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True)
class Pieces:
    """A tensor made of chunks; their archives are opened when an element is located.

    pieces: by offsets, none empty; no piece at all for a tensor without elements.
    key: the tensor's name where it was saved.
    """

    pieces: tuple[Piece, ...]
    key: str
    dtype: str
    items: Items = field(repr=False, compare=False)
    reason: None = field(default=None, init=False)
    patchable: bool = field(default=True, init=False)

    @property
    def file(self) -> str:
        files = {piece.item.file for piece in self.pieces}
        return files.pop() if len(files) == 1 else ""

    @property
    def storage(self) -> str:
        return "sharded" if len(self.pieces) > 1 else "plain"

    @property
    def order(self) -> str:
        return self._extent(self.pieces[0]).order if self.pieces else "little"

    @property
    def offset(self) -> int | None:
        return self._extent(self.pieces[0]).offset if len(self.pieces) == 1 else None

    def _extent(self, piece: Piece) -> Extent:
        return self.items.extent(piece.item, self.key, self.dtype, piece.sizes)

    def locate(self, dims: tuple[int, ...], layout: BitLayout, flat: Int) -> Iterator[Located]:
        if not self.pieces:
            return
        if len(self.pieces) == 1:
            yield from self._extent(self.pieces[0]).locate(dims, layout, flat)
            return
        axes = len(self.pieces[0].sizes)
        indexes = np.unravel_index(flat, dims)
        for piece, where in self._owners(indexes[:axes]):
            inner = (*piece.sizes, *dims[axes:])
            local = [index[where] for index in indexes]
            for axis, offset in enumerate(piece.offsets):
                local[axis] = local[axis] - offset
            steps = np.ravel_multi_index(tuple(local), inner)
            for part in self._extent(piece).locate(inner, layout, steps):
                yield replace(part, where=where[part.where])

    def _owners(self, indexes: tuple[Int, ...]) -> Iterator[tuple[Piece, Int]]:
        """The pieces that hold some of the elements, and which."""
        cuts, cells = self._cells
        owner = cells[tuple(np.searchsorted(cut, i, side="right") - 1 for cut, i in zip(cuts, indexes, strict=True))]
        rank = np.argsort(owner, kind="stable")
        edges = np.flatnonzero(np.diff(owner[rank], prepend=-1, append=len(self.pieces)))
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield self.pieces[int(owner[rank[first]])], rank[first:last]

    @cached_property
    def _cells(self) -> tuple[list[Int], Int]:
        """Where pieces begin along each axis, and the number of the piece in every cell between these cuts."""
        starts, ends = _spans(self.pieces)
        cuts = [np.unique(column) for column in starts.T]
        cells = np.zeros([len(cut) for cut in cuts], np.int64)
        firsts, lasts = (
            np.stack([np.searchsorted(cut, column) for cut, column in zip(cuts, spans.T, strict=True)], axis=1)
            for spans in (starts, ends)
        )
        for number, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True)):
            cells[tuple(map(slice, first, last))] = number
        return cuts, cells


PAIRS_LIMIT = 1 << 26
"""Pairs of pieces that are looked at; a grid of a thousand by a thousand has more, one of a thousand by 64 fewer."""

CELLS_LIMIT = 1 << 24
"""Cells of the grid that the edges of all pieces make; there are as many as pieces when these lie in a grid."""


def _spans(pieces: tuple[Piece, ...]) -> tuple[Int, Int]:
    """Where the pieces begin and end along each axis; a row for each."""
    starts = np.array([piece.offsets for piece in pieces], np.int64)
    return starts, starts + np.array([piece.sizes for piece in pieces], np.int64)


def tile(pieces: tuple[Piece, ...], shape: tuple[int, ...]) -> bool:
    """Whether the pieces cover a tensor of that shape, each element once; raises ValueError where that takes too long.

    They are swept along the axis that is cut most: only those that begin before another ends can overlap it.
    """
    if any(offset + size > length for piece in pieces
           for offset, size, length in zip(piece.offsets, piece.sizes, shape, strict=True)):  # fmt: skip
        return False
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
        return False
    if len(pieces) < 2:
        return True
    starts, ends = _spans(pieces)
    cuts = [len(np.unique(column)) for column in starts.T]
    if math.prod(cuts) > CELLS_LIMIT:
        raise ValueError(f"{len(pieces)} chunks lie in no grid")
    axis = cuts.index(max(cuts))
    rank = np.argsort(starts[:, axis], kind="stable")
    starts, ends = starts[rank], ends[rank]
    behind = np.searchsorted(starts[:, axis], ends[:, axis])
    first = np.arange(1, len(pieces) + 1)
    if int((behind - first).sum()) * len(shape) > PAIRS_LIMIT:
        raise ValueError(f"{len(pieces)} chunks are too many to compare")
    for index in np.flatnonzero(behind > first).tolist():
        others = slice(index + 1, behind[index])
        apart = (ends[others] <= starts[index]) | (starts[others] >= ends[index])
        if not apart.any(axis=1).all():
            return False
    return True
