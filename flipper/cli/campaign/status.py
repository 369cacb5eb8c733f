"""`flipper campaign status`: how far a campaign is."""

from __future__ import annotations

from pathlib import Path

import click

from flipper.cli.campaign.options import SPEC_OR_FOLDER
from flipper.cli.options import output_options
from flipper.cli.output import emit


@click.command(short_help="Say how far it is, from another shell too.")
@SPEC_OR_FOLDER
@output_options
def command(where: Path, style: str | None, quiet: bool, verbose: bool, traceback: bool) -> None:
    """Say how far a campaign is, also while another process runs it."""
    from flipper.campaigns.spec import read_spec
    from flipper.campaigns.status import status

    emit(status(where if where.is_dir() else Path(read_spec(where).name)), style)
