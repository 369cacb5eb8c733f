"""`flipper campaign report`: the page, its figures, or its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import click

from flipper.cli.campaign.options import SPEC_OR_FOLDER, existing
from flipper.cli.options import FILE, common_options
from flipper.strict_json import strict


@click.command(short_help="Write the report page, or print its numbers.")
@SPEC_OR_FOLDER
@click.option("--format", "style", type=click.Choice(["html", "json"]), default="html", help="Default: html.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Default: FOLDER/report.html; of JSON stdout.")
@click.option("--figures", type=FILE, metavar="DIR", help="Also write each figure as PDF and SVG there.")
@common_options
def command(
    where: Path, style: str, output: Path | None, figures: Path | None, quiet: bool, verbose: bool, traceback: bool
) -> None:
    """Write one self-contained page on what a campaign has found so far, or print its numbers as JSON."""
    from flipper.campaigns.results import load_results
    from flipper.campaigns.summary import summary

    if style == "json":
        text = json.dumps(strict(summary(load_results(existing(where)))), indent=1) + "\n"
        if output is None:
            click.echo(text, nl=False)
        else:
            output.write_text(text, "utf-8")
