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
) -> None:
    """Print rows as they come; `columns` is the header of tables and CSV.

    document: for JSON, the record that the rows belong to: what stands before them, their key, what follows.
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
            _write(_table(rows, columns))


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


def _table(rows: Iterable[Record], columns: Sequence[str]) -> Iterator[str]:
    lines = ([_cell(row.get(column)) for column in columns] for row in rows)
    first = list(islice(lines, SAMPLED))
    widths = [max(map(len, column)) for column in zip(columns, *first, strict=True)]
    header = "  ".join(f"{name:<{width}}" for name, width in zip(columns, widths, strict=True)).rstrip()
    yield (click.style(header, bold=True) if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else header) + "\n"
    for cells in chain(first, lines):
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip() + "\n"


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
