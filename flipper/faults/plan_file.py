"""Plans from files: JSON lines, CSV, or a sequence saved by hdf5_corrupter."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, TextIO

from flipper.checkpoints.checkpoint import Checkpoint
from flipper.errors import UsageError
from flipper.faults.corrupter_sequence import sequence_faults
from flipper.faults.effects import FLIP, OPS, WRITE
from flipper.faults.plan import FaultPlan, Target, plan_of
from flipper.text_files import read_text

Row = tuple[str, int, int, int, int]
"""Tensor, flat index, op, mask, value."""


def read_plan(path: Path, checkpoint: Checkpoint, stream: TextIO | None = None) -> FaultPlan:
    """The plan in a file, or in `stream` when it is given (`path` then only names it).

    A line is {"tensor", "flat", "bits": [...]} or {"tensor", "flat", "op", "mask", "value"}; the columns of a CSV have
    the same names. Further keys are ignored, so that the rows of a manifest or a dry run can be fed back.
    checkpoint: gives shapes and widths to a sequence of hdf5_corrupter, which has neither.
    Raises UsageError naming the line that can't be read.
    """
    try:
        text = stream.read() if stream is not None else read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--plan {path}: {getattr(error, 'strerror', None) or error}") from error
    rows = list(_rows(text.removeprefix("\ufeff"), path, checkpoint))
    names = sorted({row[0] for row in rows})
    numbers = {name: index for index, name in enumerate(names)}
    targets = [Target(name) for name in names]
    return plan_of(targets, [(numbers[name], flat, op, mask, value) for name, flat, op, mask, value in rows])


def _rows(text: str, path: Path, checkpoint: Checkpoint) -> Iterator[Row]:
    head = text.lstrip()
    if not head:
        return
    if not head.startswith(("{", "[")):
        yield from _each(_csv_rows(text), path, "row")
        return
    whole = _json_or_none(head)
    if isinstance(whole, dict) and "schema" in whole:
        raise UsageError(f"--plan {path} is a manifest; `flipper replay` strikes its faults")
    if isinstance(whole, dict) and not whole.keys() & {"tensor", "flat"}:
        for tensor, flat, mask in sequence_faults(whole, checkpoint):
            yield tensor, flat, FLIP, mask, 0
    elif isinstance(whole, list | dict):
        yield from _each(whole if isinstance(whole, list) else [whole], path, "row")
    else:
        yield from _each(_json_values(head), path, "line")


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_values(text: str) -> Iterator[Any]:
    """JSON values, each on a line of its own or, as jq prints them, over several.

    After a value a None for each further line that it takes, so that counting goes by lines.
    """
    decoder, start = json.JSONDecoder(), 0
    while start < len(text):
        value, end = decoder.raw_decode(text, start)
        while end < len(text) and text[end].isspace():
            end += 1
        yield value
        yield from repeat(None, text.count("\n", start, end) - 1)
        start = end


def _csv_rows(text: str) -> Iterator[dict[str, Any]]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    for column in ("tensor", "flat"):
        if column not in (rows.fieldnames or ()):
            raise KeyError(column)
    for row in rows:
        yield {key: value for key, value in row.items() if value or (key == "tensor" and value is not None)}


def _each(rows: Iterable[Any], path: Path, word: str) -> Iterator[Row]:
    """Each row of the plan; an error says which one it is in, counted from 1."""
    number = 0
    iterator = iter(rows)
    while True:
        number += 1
        try:
            row = next(iterator)
            if row is not None:
                yield _row(row)
        except StopIteration:
            return
        except (KeyError, TypeError, ValueError, RecursionError, csv.Error) as error:
            cause = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)[:120]
            raise UsageError(f"--plan {path}: {word} {number}: {cause}") from error


def _row(row: Mapping[str, Any]) -> Row:
    if not isinstance(row, Mapping):
        raise TypeError("not an object")
    tensor, flat = row["tensor"], _number(row["flat"])
    if not isinstance(tensor, str):
        raise TypeError("tensor is not a name")
    if flat >= 1 << 63:
        raise ValueError(f"flat {flat} is beyond every tensor")
    if "op" not in row:
        positions = _positions(row["bits"])
        return tensor, flat, FLIP, sum(1 << position for position in positions), 0
    if row["op"] not in OPS:
        raise ValueError(f"op {row['op']!r} is none of {', '.join(OPS)}")
    mask = _number(row["mask"])
    if row["op"] == "flip":
        return tensor, flat, FLIP, mask, 0
    return tensor, flat, WRITE, mask, _number(row["value"]) & mask


def _positions(bits: Any) -> set[int]:
    if isinstance(bits, str):
        bits = json.loads(bits) if bits.strip().startswith("[") else bits.replace(",", " ").split()
    found = [_number(bit) for bit in (bits if isinstance(bits, list | tuple) else [bits])]
    if any(bit > 63 for bit in found):
        raise ValueError(f"bits {max(found)}: positions go from 0 to 63")
    if len(set(found)) < len(found):
        raise ValueError("a bit is named twice")
    return set(found)


def _number(value: Any) -> int:
    """A natural number below 2**64, written as such, in decimal or in hex with 0x."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a whole number")
    if isinstance(value, str) and "_" in value:  # which only Python takes for a number
        raise ValueError(f"{value!r} is not a whole number")
    number = int(value, 0) if isinstance(value, str) else value
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{value} is not between 0 and 2**64 - 1")
    return number
