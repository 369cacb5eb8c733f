"""`flipper study`: its commands, one file each; this one finds them without importing them."""

from __future__ import annotations

from typing import Final

import click

from flipper.cli import LazyGroup

COMMANDS: Final = {
    "checkpoint": "Measure what a checkpoint costs, by format, content, ranks and mode.",
    "mesh": "Plan, prove and time allreduce on a mesh with failed chips.",
}


class StudyGroup(LazyGroup):
    """The commands of `flipper study`."""

    table = COMMANDS
    package = "flipper.cli.study"


@click.group(cls=StudyGroup, short_help="Study what resilience costs: checkpoints, allreduce round failed chips.")
def command() -> None:
    """Study what resilience costs."""
