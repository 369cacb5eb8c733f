"""`flipper campaign trial`: run one trial by itself, again, anywhere."""

from __future__ import annotations

from pathlib import Path

import click

from flipper.cli.campaign.options import FOLDER, existing
from flipper.cli.options import output_options
from flipper.cli.output import emit


@click.command(short_help="Run one trial by itself, again.")
@click.argument("where", metavar="FOLDER", type=FOLDER)
@click.option("--cell", type=click.IntRange(0), required=True, metavar="K", help="Its cell, as `show` lists them.")
@click.option("--trial", "number", type=click.IntRange(0), required=True, metavar="N", help="Its number in the cell.")
@click.option("--keep", is_flag=True, help="Keep the altered checkpoint, its manifest and the record, under trials/.")
@click.option("--full", is_flag=True, help="Go on to the last step even where the future is known.")
@output_options
def command(
    where: Path,
    cell: int,
    number: int,
    keep: bool,
    full: bool,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
) -> None:
    """Run one trial of a campaign again and print what it comes to; the campaign's results stay as they are."""
    from flipper.campaigns.again import run_again

    emit(run_again(existing(where), cell, number, full=full, keep=keep), style)
