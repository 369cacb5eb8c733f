"""`flipper diff`: the elements in which two checkpoints differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from flipper.cli.options import CHECKPOINT, output_options
from flipper.cli.output import emit, emit_rows, say, tell_opened
from flipper.cli.progress import progress, watched

SPARE = (("index", "xor"), ("dtype", "before", "after", "fields"))


@click.command(short_help="List the elements in which two checkpoints differ.")
@click.argument("a", type=CHECKPOINT)
@click.argument("b", type=CHECKPOINT)
@click.option("--summary", "summarise", is_flag=True, help="Count by tensor, bit position and field instead.")
@output_options
def command(a: Path, b: Path, summarise: bool, style: str | None, quiet: bool, verbose: bool, traceback: bool) -> None:
    """One row for each element in which A and B differ, whatever their formats. Exit code 0 when equal, 3 when not.

    \b
    Example:
      flipper diff sample_checkpoints/digits-cnn.pt sample_checkpoints/digits-cnn.h5
    """
    from flipper.checkpoints import open_checkpoint
    from flipper.injection.diff import COLUMNS, Summary, Unmatched, differences, rows

    summary = Summary()

    def told() -> Iterator[dict[str, Any]]:
        for found in differences(one, other):
            summary.add(found)
            yield from [found.row()] if isinstance(found, Unmatched) else rows(found)

    with open_checkpoint(a) as one, open_checkpoint(b) as other:
        size = one.size + other.size
        for opened in (one, other):
            tell_opened(opened, quiet, verbose)
        if summarise:
            with progress("comparing", size, quiet):
                for found in differences(one, other):
                    summary.add(found)
            emit(summary.record(), style)
        else:
            emit_rows(watched(told(), "comparing", size, style, quiet), style, COLUMNS, spare=SPARE)
    record = summary.record()
    counted = f"elements that differ: {record['elements']}, bits: {record['bits']}"
    say(f"{counted}; tensors without a match: {len(record['unmatched'])}", quiet)
    if not record["equal"]:
        raise SystemExit(3)
