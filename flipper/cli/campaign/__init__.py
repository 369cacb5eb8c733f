"""`flipper campaign`: its commands, one file each; this one finds them without importing them."""

from __future__ import annotations

from typing import Final

import click

from flipper.cli import LazyGroup

COMMANDS: Final = {
    "show": "Print the plan: cells, trials, margin, expected hours.",
    "run": "Run it, or go on with it.",
    "status": "Say how far it is, from another shell too.",
    "trial": "Run one trial by itself, again.",
    "report": "Write the report page, or print its numbers.",
    "export": "Print or write one row a trial.",
    "merge": "Join the results of shards.",
}


class CampaignGroup(LazyGroup):
    """The commands of `flipper campaign`."""

    table = COMMANDS
    package = "flipper.cli.campaign"


@click.group(cls=CampaignGroup, short_help="Run thousands of trials and compare what they come to.")
def command() -> None:
    """Run thousands of trials and compare what they come to: SPEC is a campaign file, FOLDER what a run made of it."""
