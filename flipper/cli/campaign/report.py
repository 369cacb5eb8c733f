"""`flipper campaign report`: the page, its figures, or its numbers."""

from __future__ import annotations

from pathlib import Path

import click

from flipper.cli.campaign.options import FOLDER, SPEC_OR_FOLDER, existing
from flipper.cli.options import FILE, common_options
from flipper.cli.output import say


@click.command(short_help="Write the report page, or print its numbers.")
@SPEC_OR_FOLDER
@click.option("--format", "style", type=click.Choice(["html", "json"]), default="html", help="Default: html.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Default: FOLDER/report.html; of JSON stdout.")
@click.option("--figures", type=FOLDER, metavar="DIR", help="Also write each figure as PDF and SVG there.")
@common_options
def command(
    where: Path, style: str, output: Path | None, figures: Path | None, quiet: bool, verbose: bool, traceback: bool
) -> None:
    """Write one self-contained page on what a campaign has found so far, or print its numbers as JSON.

    \b
    Example:
      flipper campaign report demo --figures figures
    """
    from flipper.report.writing import write_numbers, write_report

    campaign = existing(where)
    if style == "json":
        text, written = write_numbers(campaign, output, figures)
        if output is None:
            click.echo(text, nl=False)
    else:
        written = write_report(campaign, output, figures)
    for path in written:
        say(f"wrote {path}", quiet)
