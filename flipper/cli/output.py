"""What commands print: records as table, JSON, JSON lines or CSV on stdout; everything else on stderr."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from flipper.strict_json import strict, text

if TYPE_CHECKING:
    from flipper.checkpoints import Checkpoint

FORMATS = ("table", "json", "jsonl", "csv")
SAMPLED = 200
"""Rows looked at to choose the widths of a table; those after them are printed as they come."""

Record = Mapping[str, Any]
Spare = tuple[Sequence[str], Sequence[str]]

NARROWEST = 12
"""Characters to which a column may be shortened."""


def format_or_default(name: str | None) -> str:
    """The format asked for, else a table on a terminal and JSON lines anywhere else."""
    return name or ("table" if sys.stdout.isatty() else "jsonl")


def emit(record: Record, style: str | None) -> None:
    """Print one record."""
    style = format_or_default(style)
    if style == "table":
        _write(_record_lines(record))
    elif style == "json":
        _write([json.dumps(strict(record), indent=2, ensure_ascii=_ascii()) + "\n"])
    else:
        emit_rows([record], style, tuple(record))


def emit_rows(
    rows: Iterable[Record],
    style: str | None,
    columns: Sequence[str],
    document: tuple[Record, str, Record] | None = None,
    spare: Spare = ((), ()),
) -> None:
    """Print rows as they come; `columns` is the header of tables and CSV.

    document: for JSON, the record that the rows belong to: what stands before them, their key, what follows.
    spare: columns that a table on a narrow terminal does without: those that repeat others, those that matter least.
    """
    style = format_or_default(style)
    with ExitStack() as stack:
        if isinstance(rows, Generator):  # its bar must be gone before an error is told
            stack.enter_context(closing(rows))
        if style == "jsonl":
            _write(_json(row, (",", ":")) + "\n" for row in rows)
        elif style == "json":
            _write(_json_document(rows, document))
        elif style == "csv":
            _write(_csv_lines(rows, columns))
        else:
            _write(_table(rows, columns, spare))


def tell_opened(checkpoint: Checkpoint, quiet: bool, verbose: bool) -> None:
    """What the user should hear about a checkpoint; with `verbose` also what it is."""
    if verbose:
        what = f"{checkpoint.format}, {len(checkpoint.tensors)} tensors, {checkpoint.size:,} bytes"
        say(f"{checkpoint.path}: {what}", quiet)
    for note in checkpoint.notes:
        say(f"note: {note}", quiet)


def say(text: str, quiet: bool = False) -> None:
    """A line for the user, on stderr."""
    if not quiet:
        click.echo(printable(text), err=True)


def printable(text: str) -> str:
    """The text with control characters escaped: a name in a file can't steer the terminal, nor break a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _write(pieces: Iterable[str]) -> None:
    """Write as they come, through the stream's buffer: a flush a row would cost more than the row."""
    for piece in pieces:
        sys.stdout.write(piece)
    sys.stdout.flush()


def _json(value: Any, separators: tuple[str, str] = (", ", ": ")) -> str:
    return text(value, separators, _ascii())


def _ascii() -> bool:
    """Whether JSON must escape all but ASCII, since stdout's encoding lacks it."""
    return (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"


def _json_document(rows: Iterable[Record], document: tuple[Record, str, Record] | None) -> Iterator[str]:
    lead, tail = "[", "]"
    if document is not None:
        before, key, after = document
        lead = "{" + "".join(f"{_json(name)}: {_json(value)}, " for name, value in before.items()) + f"{_json(key)}: ["
        tail = "]" + "".join(f", {_json(name)}: {_json(value)}" for name, value in after.items()) + "}"
    yield lead
    separator = "\n  "
    for row in rows:
        yield separator + _json(row)
        separator = ",\n  "
    yield f"\n{tail}\n" if separator[0] == "," else f"{tail}\n"


def _csv_lines(rows: Iterable[Record], columns: Sequence[str]) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for cells in chain([list(columns)], ([_csv_cell(row.get(column)) for column in columns] for row in rows)):
        writer.writerow(cells)
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def _csv_cell(value: Any) -> Any:
    value = strict(value)
    if isinstance(value, bool):
        return str(value).lower()
    return _json(value, (",", ":")) if isinstance(value, dict | list) else value


def _record_lines(record: Record) -> Iterator[str]:
    """A line a key; a list of records has a line for each of them."""
    width = max(map(len, record), default=0)
    for key, value in record.items():
        nested = isinstance(value, list) and len(value) > 0 and isinstance(value[0], Mapping)
        for number, item in enumerate(value if nested else [value]):
            yield f"{'' if number else key:<{width}}  {_cell(item)}\n"


def _table(rows: Iterable[Record], columns: Sequence[str], spare: Spare) -> Iterator[str]:
    lines = ([_cell(row.get(column)) for column in columns] for row in rows)
    first = list(islice(lines, SAMPLED))
    room = _room()
    widths = {
        column: max(map(len, cells)) for column, cells in zip(columns, zip(columns, *first, strict=True), strict=True)
    }
    if room is not None:
        empty = {column for column, (_, *cells) in zip(columns, zip(columns, *first, strict=True), strict=True)
                 if all(cell == "-" for cell in cells)}  # fmt: skip
        widths = _fitted(widths, room, empty, spare)
    shown = [(index, widths[column]) for index, column in enumerate(columns) if column in widths]

    def line(cells: Sequence[str]) -> str:
        fitting = (cells[index] if room is None else _shortened(cells[index], width) for index, width in shown)
        return "  ".join(f"{cell:<{width}}" for cell, (_, width) in zip(fitting, shown, strict=True)).rstrip()

    header = line(columns)
    yield (click.style(header, bold=True) if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else header) + "\n"
    for cells in chain(first, lines):
        yield line(cells) + "\n"


def _room() -> int | None:
    """Characters of a line of the terminal; None where stdout is none, or doesn't say."""
    if not sys.stdout.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None


def _fitted(widths: dict[str, int], room: int, empty: set[str], spare: Spare) -> dict[str, int]:
    """The columns that are shown, and their widths, so that a line fits if it can.

    Columns that say nothing go first, then those that repeat others; then long texts are shortened, and so on.
    """
    kept = dict(widths)
    repeating, least = spare
    _drop(kept, room, [column for column in (*repeating, *least) if column in empty])
    _drop(kept, room, repeating)
    _shorten(kept, room, max(room // 3, NARROWEST))
    _drop(kept, room, least)
    _shorten(kept, room, NARROWEST)
    return kept


def _excess(widths: Mapping[str, int], room: int) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1) - room


def _drop(widths: dict[str, int], room: int, columns: Sequence[str]) -> None:
    for column in columns:
        if _excess(widths, room) > 0:
            widths.pop(column, None)


def _shorten(widths: dict[str, int], room: int, floor: int) -> None:
    """Take from the widest column what is too much, but not below `floor`."""
    for column in sorted(widths, key=lambda column: -widths[column]):
        too_much = min(_excess(widths, room), widths[column] - floor)
        if too_much > 0:
            widths[column] -= too_much


def _shortened(text: str, width: int) -> str:
    """The text with its middle left out where it is too long: names differ at their ends."""
    return text if len(text) <= width else f"{text[: (width - 1) // 2]}..{text[len(text) - (width - 2) // 2 :]}"


def _cell(value: Any) -> str:
    value = strict(value)
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ",".join(map(_cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{printable(key)} {_cell(item)}" for key, item in value.items())
    return printable(str(value))
