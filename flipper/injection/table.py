"""FaultTable: the struck elements of a checkpoint as columns, and as the rows of a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from flipper import bits
from flipper.bits.layout import Bits
from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.elements import Int
from flipper.faults.effects import FLIP, OPS, strike
from flipper.faults.plan import FaultPlan, Ops, Target, equal_fields
from flipper.injection.changes import Changes

COLUMNS = (
    "tensor", "aliases", "flat", "index", "dtype", "op", "mask", "value", "bits", "fields", "before", "after",
    "before_value", "after_value", "file", "offset",
)  # fmt: skip
"""What a row of a manifest has."""

BATCH = 4096
"""Rows decoded together."""

STORED = 1 << 17
"""Rows stored or counted together: a megabyte at most, so that what is made of them stays in cache."""


@dataclass(frozen=True)
class StruckTensor:
    """A tensor that rows refer to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape in real numbers."""
        return self.shape + ((2,) if bits.layout(self.dtype).components == 2 else ())


@dataclass(frozen=True)
class FaultTable:
    """One row a struck element, by tensor and element.

    tensors, files: what the columns `tensor` and `file` index. before, after: the whole elements. The other columns as
    in Columns, all of one length.
    """

    tensors: tuple[StruckTensor, ...]
    files: tuple[str, ...]
    tensor: Int
    flat: Int
    op: Ops
    mask: Bits
    value: Bits
    before: Bits
    after: Bits
    file: Int
    offset: Int

    def __len__(self) -> int:
        return len(self.flat)

    def __eq__(self, other: object) -> bool:
        return equal_fields(self, other) if isinstance(other, FaultTable) else NotImplemented

    @property
    def bits_changed(self) -> int:
        """Bits that are other than before."""
        total = 0
        for first in range(0, len(self), STORED):
            part = slice(first, first + STORED)
            octets = (self.before[part] ^ self.after[part]).view(np.uint8)
            total += int(np.count_nonzero(np.unpackbits(octets).view(np.bool_)))
        return total

    @property
    def unchanged(self) -> int:
        """Struck elements that are as before: writes of what was there already."""
        return int(np.count_nonzero(self.before == self.after))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each row with all that COLUMNS names; numbers in hex where INTERFACE says so."""
        for first in range(0, len(self), BATCH):
            part = slice(first, min(first + BATCH, len(self)))
            before, after = self._decoded(self.before, part), self._decoded(self.after, part)
            for row in range(part.start, part.stop):
                yield self._row(row, before[row - first], after[row - first])

    def slices(self) -> Iterator[tuple[StruckTensor, slice]]:
        """Each tensor with its rows."""
        edges = np.searchsorted(self.tensor, np.arange(len(self.tensors) + 1)).tolist()
        for number, tensor in enumerate(self.tensors):
            if edges[number] < edges[number + 1]:
                yield tensor, slice(edges[number], edges[number + 1])

    def plan(self, **drawn: Any) -> FaultPlan:
        """The plan that strikes the same faults again."""
        targets = tuple(Target(tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors)
        return FaultPlan(targets, self.tensor, self.flat.astype(np.int64), self.op, self.mask, self.value, **drawn)

    def _decoded(self, column: Bits, part: slice) -> list[Any]:
        values: list[Any] = []
        numbers = self.tensor[part]
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for first, last in pairwise(edges):
            if first < last:
                layout = bits.layout(self.tensors[int(numbers[first])].dtype)
                values += layout.decode(column[part][first:last].astype(np.uint64)).tolist()
        return values

    def _row(self, row: int, before: Any, after: Any) -> dict[str, Any]:
        tensor = self.tensors[int(self.tensor[row])]
        layout = bits.layout(tensor.dtype)
        digits = (layout.width + 3) // 4
        mask, offset = int(self.mask[row]), int(self.offset[row])
        positions, fields = _marked(tensor.dtype, mask)
        return {
            "tensor": tensor.name,
            "aliases": list(tensor.aliases),
            "flat": int(self.flat[row]),
            "index": [int(i) for i in np.unravel_index(int(self.flat[row]), tensor.dims)] if tensor.dims else [],
            "dtype": tensor.dtype,
            "op": OPS[int(self.op[row])],
            "mask": f"0x{mask:0{digits}x}",
            "value": None if self.op[row] == FLIP else f"0x{int(self.value[row]):0{digits}x}",
            "bits": list(positions),
            "fields": list(fields),
            "before": f"0x{int(self.before[row]):0{digits}x}",
            "after": f"0x{int(self.after[row]):0{digits}x}",
            "before_value": before,
            "after_value": after,
            "file": self.files[int(self.file[row])],
            "offset": None if offset < 0 else offset,
        }

    def write_npz(self, path: Path) -> None:
        """Write the table as a .npz archive into an empty file, the same bytes for the same rows."""
        import zipfile

        # Opened without truncating: what was truncated ext4 writes to the disk at once when it is closed.
        # Not by np.savez: one column is called as its own parameter.
        with open(path, "r+b") as file, zipfile.ZipFile(file, "w") as archive:
            for name, column in self._stored().items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                    _write_column(entry, column)

    def _stored(self) -> dict[str, Any]:
        """The columns of the archive."""
        texts = {
            "tensors": [tensor.name for tensor in self.tensors],
            "aliases": [json.dumps(tensor.aliases) for tensor in self.tensors],
            "dtypes": [tensor.dtype for tensor in self.tensors],
            "shapes": [json.dumps(tensor.shape) for tensor in self.tensors],
            "files": self.files,
        }
        return {name: np.array(text, np.str_) for name, text in texts.items()} | {
            name: getattr(self, name) for name in ARRAYS
        }


@lru_cache(maxsize=1 << 16)
def _marked(dtype: str, mask: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions of a mask's ones, and their fields, topmost first; kept, since masks recur in most plans."""
    layout = bits.layout(dtype)
    positions = tuple(position for position in range(layout.width) if mask >> position & 1)
    return positions, tuple(dict.fromkeys(layout.field_of(position) for position in reversed(positions)))


ARRAYS = {
    "tensor": np.int64, "flat": np.int64, "op": np.uint8, "mask": np.uint64, "value": np.uint64, "before": np.uint64,
    "after": np.uint64, "file": np.int64, "offset": np.int64,
}  # fmt: skip
"""The columns of a stored table."""


def table_of(checkpoint: Checkpoint, changes: Changes, files: Sequence[str]) -> FaultTable:
    """The table of what changes_of found, with the struck elements as `checkpoint` has them.

    files: as the manifest shall name them, in the order of Changes.files.
    """
    struck, columns = changes.struck, changes.columns
    tensors = tuple(StruckTensor(s.tensor.name, s.tensor.dtype, s.tensor.shape, s.tensor.aliases) for s in struck)
    numbers = np.repeat(np.arange(len(struck), dtype=np.min_scalar_type(len(struck))), [len(s.narrow) for s in struck])
    before, after = np.empty_like(columns.mask), np.empty_like(columns.mask)
    for one in struck:
        rows = one.rows
        before[rows] = checkpoint.read_bits(one.tensor, one.flat) if one.before is None else one.before
        after[rows] = strike(before[rows], columns.op[rows], columns.mask[rows], columns.value[rows])
    return FaultTable(tensors, tuple(files), numbers, before=before, after=after, **vars(columns))


def _write_column(file: IO[bytes], column: Any) -> None:
    """Write a column as .npy; numbers in the narrowest unsigned type that holds them, if none is negative."""
    kind = column.dtype
    if kind.kind in "iu" and len(column) and column.min() >= 0:
        kind = np.min_scalar_type(int(column.max()))
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": column.shape}
    )
    for first in range(0, len(column), STORED):
        file.write(column[first : first + STORED].astype(kind, copy=False).data)
