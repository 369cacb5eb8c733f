"""`flipper campaign export`: one row a trial."""

from __future__ import annotations

from pathlib import Path

import click

from flipper.cli.campaign.options import SPEC_OR_FOLDER, existing
from flipper.cli.options import FILE, common_options
from flipper.cli.output import emit_rows


@click.command(short_help="Print or write one row a trial.")
@SPEC_OR_FOLDER
@click.option("--to", type=click.Choice(["csv", "jsonl", "parquet"]), default="csv", help="Default: csv.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Default: stdout; parquet needs a file.")
@common_options
def command(where: Path, to: str, output: Path | None, quiet: bool, verbose: bool, traceback: bool) -> None:
    """Write one row for each trial: its cell, its axes, its outcome and what was measured.

    \b
    Example:
      flipper campaign export demo --to csv -o demo.csv
    """
    from flipper.campaigns.export import write_rows
    from flipper.campaigns.results import columns, load_results, rows
    from flipper.errors import UsageError

    results = load_results(existing(where))
    if output is not None:
        write_rows(results, output, to)
    elif to == "parquet":
        raise UsageError("--to parquet needs -o FILE: it is no text")
    else:
        emit_rows(rows(results), to, columns(results))
