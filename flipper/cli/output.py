"""What commands print: records as table, JSON, JSON lines or CSV on stdout; everything else on stderr."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import click

from flipper.strict_json import strict, text

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
        width = max(map(len, record), default=0)
        for key, value in record.items():
            click.echo(f"{key:<{width}}  {_cell(value)}")
    elif style == "json":
        click.echo(json.dumps(strict(record), indent=2, ensure_ascii=False))
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
    if style == "jsonl":
        for row in rows:
            click.echo(_compact(row))
    elif style == "json":
        _json_document(rows, document)
    elif style == "csv":
        for line in _csv_lines(rows, columns):
            click.echo(line, nl=False)
    else:
        _table(rows, columns)


def say(line: str, quiet: bool = False) -> None:
    """A line for the user, on stderr."""
    if not quiet:
        click.echo(line, err=True)


def _compact(row: Record) -> str:
    return text(row, separators=(",", ":"))


def _json_document(rows: Iterable[Record], document: tuple[Record, str, Record] | None) -> None:
    lead, tail = "[", "]"
    if document is not None:
        before, key, after = document
        lead = "{" + "".join(f"{_member(name, value)}, " for name, value in before.items()) + f"{json.dumps(key)}: ["
        tail = "]" + "".join(f", {_member(name, value)}" for name, value in after.items()) + "}"
    click.echo(lead, nl=False)
    separator = "\n  "
    for row in rows:
        click.echo(separator + text(row), nl=False)
        separator = ",\n  "
    click.echo("\n" + tail if separator[0] == "," else tail)


def _member(name: str, value: Any) -> str:
    return f"{json.dumps(name)}: {text(value)}"


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
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False) if isinstance(value, dict | list) else value


def _table(rows: Iterable[Record], columns: Sequence[str]) -> None:
    lines = ([_cell(row.get(column)) for column in columns] for row in rows)
    first = list(islice(lines, SAMPLED))
    widths = [max(map(len, column)) for column in zip(columns, *first, strict=True)]
    header = "  ".join(f"{name:<{width}}" for name, width in zip(columns, widths, strict=True)).rstrip()
    click.echo(click.style(header, bold=True) if sys.stdout.isatty() else header)
    for cells in chain(first, lines):
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    value = strict(value)
    if value is None or value == []:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ",".join(map(_cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    return str(value)
