"""The command line: one file per command; this one finds them without importing them."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

import click

COMMANDS: Final = {
    "inspect": "List the tensors of a checkpoint and count the bits that can be struck.",
    "inject": "Flip bits: write an altered copy, or alter in place.",
    "diff": "List the elements in which two checkpoints differ.",
    "verify": "Check a container, and that exactly the recorded faults were made.",
    "undo": "Return a file to its bytes before an injection.",
    "replay": "Strike recorded faults in another checkpoint, of any format.",
    "convert": "Write a checkpoint in another format, without loss.",
    "size": "Trials needed for a margin of error, or the margin they give.",
    "train": "Train a recipe, or resume it, in one parallel layout.",
    "completion": "Print the completion script for a shell.",
}
"""Command -> its short help. The command `x` is `command` in flipper/cli/x.py; a test keeps both in step."""


class LazyGroup(click.Group):
    """A group that lists its commands from COMMANDS and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f"flipper.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="flipper-ckpt", prog_name="flipper")
def cli() -> None:
    """Flip bits in deep-learning checkpoints and measure what they do to training."""


def main(argv: list[str] | None = None, **settings: Any) -> None:
    """Run the command line; every error that flipper raises on purpose ends as one clear line and its exit code."""
    settings.setdefault("prog_name", "flipper")
    arguments = sys.argv[1:] if argv is None else argv
    from flipper.errors import FlipperError

    try:
        cli.main(arguments, **settings)
    except FlipperError as error:
        if "--traceback" in arguments:
            raise
        click.echo(f"flipper: error: {error}", err=True)
        sys.exit(error.exit_code)
