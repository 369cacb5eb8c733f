"""Stored tables: the faults of a manifest read back, from its own rows or from the .npz beside it, and checked."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from zipfile import BadZipFile

import numpy as np

from flipper import bits
from flipper.checkpoints.elements import Int
from flipper.errors import FlipperError
from flipper.faults.effects import FLIP, OPS, WRITE, strike
from flipper.injection.table import ARRAYS, STORED, FaultTable, StruckTensor


def table_from_rows(rows: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> FaultTable:
    """The table of a manifest's inline rows; shapes: of each tensor by name.

    Raises FlipperError naming the row that can't be read, or for rows that contradict themselves or each other.
    """
    tensors: dict[str, StruckTensor] = {}
    numbers: dict[str, int] = {}
    files: dict[str, int] = {}
    columns: dict[str, list[int]] = {name: [] for name in ARRAYS}
    for number, row in enumerate(rows):
        try:
            name = row["tensor"]
            tensor = _tensor(name, row["dtype"], shapes[name], row["aliases"])
            if tensors.setdefault(name, tensor) != tensor:
                raise ValueError(f"{name} has another dtype or other aliases than before")
            columns["tensor"].append(numbers.setdefault(name, len(numbers)))
            columns["flat"].append(_natural(row["flat"]))
            columns["op"].append(OPS.index(row["op"]))
            columns["mask"].append(_hex(row["mask"]))
            columns["value"].append(0 if row["value"] is None else _hex(row["value"]))
            columns["before"].append(_hex(row["before"]))
            columns["after"].append(_hex(row["after"]))
            columns["file"].append(files.setdefault(_text(row["file"]), len(files)))
            columns["offset"].append(-1 if row["offset"] is None else _natural(row["offset"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            cause = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise FlipperError(f"row {number} of the manifest's faults can't be read: {cause[:100]}") from error
    arrays = {name: np.array(columns[name], kind) for name, kind in ARRAYS.items()}
    return _checked(FaultTable(tuple(tensors.values()), tuple(files), **arrays))


def table_from_npz(data: bytes) -> FaultTable:
    """The table of a .npz archive that FaultTable.write_npz made; raises FlipperError for anything else."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            parts = [archive[name].tolist() for name in ("tensors", "aliases", "dtypes", "shapes", "files")]
            columns = {name: archive[name].astype(kind) for name, kind in ARRAYS.items()}
        names, aliases, dtypes, shapes, files = parts
        tensors = tuple(
            _tensor(name, dtype, json.loads(shape), json.loads(also))
            for name, also, dtype, shape in zip(names, aliases, dtypes, shapes, strict=True)
        )
        if len({column.shape for column in columns.values()}) != 1 or columns["tensor"].ndim != 1:
            raise ValueError("its columns are not of one length")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile) as error:
        raise FlipperError(f"the manifest's table of faults can't be read: {str(error)[:100]}") from error
    return _checked(FaultTable(tensors, tuple(files), **columns))


def _tensor(name: Any, dtype: Any, shape: Any, aliases: Any) -> StruckTensor:
    if not all(isinstance(one, str) for one in (name, dtype, *aliases)) or isinstance(aliases, str):
        raise ValueError("tensor, dtype or aliases are no names")
    bits.layout(dtype)
    return StruckTensor(name, dtype, tuple(_natural(size) for size in shape), tuple(aliases))


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is not a whole number from 0 to 2**63 - 1")
    return value


def _hex(value: Any) -> int:
    number = int(value, 16) if isinstance(value, str) else -1
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{value!r:.40} is not a number in hex of at most 64 bits")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no name of a file")
    return value


def _checked(table: FaultTable) -> FaultTable:
    """The table; raises FlipperError when a row contradicts itself, its tensor or another row.

    What is undone and replayed is what the rows say; half of a changed row would be believed without this.
    """
    if not (_all_below(table.tensor, len(table.tensors)) and _all_below(table.file, len(table.files))):
        raise FlipperError("a row of the manifest's faults is of a tensor or file that isn't listed")
    if np.any(table.tensor[1:] < table.tensor[:-1]):
        raise FlipperError("the rows of the manifest's faults are not ordered by tensor")
    for tensor, rows in table.slices():
        flat = table.flat[rows]
        if not 0 <= flat.min() <= flat.max() < math.prod(tensor.dims):
            raise FlipperError(f"the manifest strikes an element that {tensor.name} of its own shape hasn't got")
        if np.any(flat[1:] <= flat[:-1]):
            raise FlipperError(f"the manifest's rows of {tensor.name} are not one an element, by ascending flat index")
        for first in range(rows.start, rows.stop, STORED):
            _check_bits(table, tensor, slice(first, min(first + STORED, rows.stop)))
    return table


def _all_below(numbers: Int, limit: int) -> bool:
    return len(numbers) == 0 or bool(0 <= numbers.min() <= numbers.max() < limit)


def _check_bits(table: FaultTable, tensor: StruckTensor, rows: slice) -> None:
    """Whether the recorded fault makes what was before into what is recorded as after."""
    op, mask, value = table.op[rows], table.mask[rows], table.value[rows]
    before, after = table.before[rows], table.after[rows]
    width = np.uint64(bits.layout(tensor.dtype).width)
    wrong = (op != FLIP) & (op != WRITE) | (strike(before, op, mask, value) != after)
    if width < 64:
        wrong |= (mask | value | before | after) >> width != 0
    if wrong.any():
        row = rows.start + int(np.flatnonzero(wrong)[0])
        where = f"row {row} of the manifest's faults ({tensor.name}, element {int(table.flat[row])})"
        raise FlipperError(f"{where}: its op, mask and value don't make its before into its after")
