"""Checkpoint: what every container format offers; a format is a subclass in a module of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import numpy as np

from flipper.bits.layout import Bits
from flipper.checkpoints import elements
from flipper.checkpoints.elements import Bytes, Int
from flipper.checkpoints.source import Source
from flipper.checkpoints.tensor import Tensor
from flipper.checkpoints.tree import Leaf, Tree
from flipper.errors import CheckpointError, UsageError

Edit = tuple[Tensor, Int, Bits]
"""A change inside one tensor: flat indexes, ascending and distinct, and the XOR of each element."""

@dataclass(frozen=True, slots=True)
class Region:
    """A part of a file, and where it lies in one that was written anew from it, maybe with other content."""

    start: int
    size: int
    new_start: int
    new_size: int


BLOCK_ELEMENTS = 1 << 18
"""Elements of one block when a whole tensor is streamed."""


class Checkpoint:
    """A set of named tensors whose bytes lie at known places; opening it reads headers only.

    path: the file or directory. sources: its files by relative name; "" for a single file.
    tensors: by name (code point order), ties merged, unsupported ones included.
    notes: what the user should hear about this file (foreign classes in a pickle, ...).
    """

    format: ClassVar[str] = ""
    rewrites_in_place: ClassVar[bool] = False
    """Whether `rewrite` leaves all other bytes where they were, so that a byte-wise undo is possible."""

    def __init__(self, path: Path, sources: dict[str, Source], tensors: Sequence[Tensor]) -> None:
        self.path = path
        self.sources = sources
        self.tensors = tuple(tensors)
        self.notes: tuple[str, ...] = ()
        self._by_name: dict[str, Tensor] | None = None

    @property
    def size(self) -> int:
        """Bytes of all its files together."""
        return sum(source.size for source in self.sources.values())

    @property
    def is_directory(self) -> bool:
        """Whether the checkpoint is a directory of files."""
        return "" not in self.sources

    def tensor(self, name: str) -> Tensor:
        """The tensor that has `name` as its name or as an alias; raises UsageError if there is none."""
        if self._by_name is None:
            # From the last to the first: of tensors that share a name, the one that can be struck comes first.
            self._by_name = {alias: tensor for tensor in reversed(self.tensors) for alias in tensor.names}
        try:
            return self._by_name[name]
        except KeyError:
            raise UsageError(f"{self.path} has no tensor {name!r}") from None

    def tree(self) -> Tree:
        """The structure that the container records; a flat dict of all tensors, aliases too, where it records none."""
        return {name: Leaf(name) for name in sorted(name for tensor in self.tensors for name in tensor.names)}

    def read_bits(self, tensor: Tensor, flat: Int) -> Bits:
        """The elements at flat (row-major) indexes, as numbers; uint64, same order."""
        if not tensor.place.patchable:
            return self._read_boxed(tensor, flat)
        bits = np.zeros(len(flat), np.uint64)
        for part in tensor.place.locate(tensor.dims, tensor.layout, flat):
            source = self.sources[part.file]
            bits[part.where] = elements.gather(source, part.offsets, tensor.layout, part.order, part.shifts)
        return bits

    def blocks(self, tensor: Tensor, count: int = BLOCK_ELEMENTS) -> Iterator[Bits]:
        """All elements in row-major order, up to `count` at a time (`count` is a multiple of 8)."""
        for first in range(0, tensor.elements, count):
            last = min(first + count, tensor.elements)
            start = tensor.place.offset
            if start is None:
                yield self.read_bits(tensor, np.arange(first, last, dtype=np.int64))
            else:
                layout = tensor.layout
                begin, end = first * layout.width // 8, (last * layout.width + 7) // 8
                data = self.sources[tensor.place.file].read(start + begin, end - begin)
                order = getattr(tensor.place, "order", "little")
                yield elements.contiguous_bits(data, layout, order)[: last - first]

    def checksum_masks(self, file: str, offsets: Int, masks: Bytes) -> tuple[Int, Bytes]:
        """The further bytes of `file` to XOR so that its checksums follow the change given; none by default.

        offsets, masks: the bytes that change, ascending and distinct.
        """
        return offsets[:0], masks[:0]

    def rewrite(
        self, target: Path, file: str, edits: Sequence[Edit], keep_checksums: bool = False
    ) -> tuple[Region, ...]:
        """Make edits of tensors that are not patchable in `target`, a copy of `file` that is already patched.

        keep_checksums: leave those of what is rewritten as they were. Returns the regions of `file`, from end to end,
        when `rewrites_in_place` doesn't hold; they are in the same order in both files.
        """
        raise CheckpointError("unsupported-storage", f"{self.path}: {self.format} has nothing to rewrite")

    def problems(self) -> Iterator[str]:
        """What is wrong with the container beyond what opening it found: checksums that don't hold, ..."""
        return iter(())

    def close(self) -> None:
        """Close all files."""
        for source in self.sources.values():
            source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_boxed(self, tensor: Tensor, flat: Int) -> Bits:
        raise CheckpointError("unsupported-storage", f"{tensor.name}: {tensor.place.reason or tensor.place.storage}")
