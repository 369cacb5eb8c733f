"""Export: the rows of results as a file of CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from flipper.campaigns.results import Results, columns, rows
from flipper.checkpoints.output import atomic_output, writing
from flipper.errors import UsageError
from flipper.strict_json import strict, text


def write_rows(results: Results, path: Path, to: str) -> None:
    """Write one row a trial, replacing what is there. to: csv, jsonl or parquet.

    Raises OutputError when the file can't be written, UsageError when Parquet's library is missing.
    """
    with atomic_output(path, force=True) as partial, writing(path):
        if to == "parquet":
            _write_parquet(results, partial)
            return
        with partial.open("w", encoding="utf-8", newline="") as file:
            if to == "jsonl":
                file.writelines(text(row, (",", ":")) + "\n" for row in rows(results))
            else:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns(results))
                writer.writerows([_cell(row[column]) for column in columns(results)] for row in rows(results))


def _cell(value: Any) -> Any:
    value = strict(value)
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, separators=(",", ":")) if isinstance(value, list | dict) else value


def _write_parquet(results: Results, path: Path) -> None:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError("Parquet needs pyarrow, which is not installed; pip install 'flipper-ckpt[report]'") from None
    listed = list(rows(results))
    for row in listed:
        row["seed"] = None if row["seed"] is None else str(row["seed"])  # above what signed 64-bit numbers hold
        row["training_seed"] = str(row["training_seed"])
    axes = {axis: [_plain(row[axis]) for row in listed] for axis in results.axes}
    data = {name: axes.get(name, [row[name] for row in listed]) for name in columns(results)}
    parquet.write_table(arrow.table(data), path)


def _plain(value: Any) -> Any:
    """An axis has one type in a column: text, unless all its values are numbers."""
    return value if isinstance(value, int | float | None) else _cell(value)
