"""`flipper completion`: the script that makes a shell complete flipper's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from flipper.cli.options import common_options

SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print the completion script for a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@common_options
def command(shell: str, quiet: bool, verbose: bool, traceback: bool) -> None:
    """Print the completion script for SHELL.

    \b
    Example:
      flipper completion bash > ~/.local/share/bash-completion/completions/flipper
    """
    from flipper.cli import cli

    found = get_completion_class(shell)
    assert found is not None
    # click asks the installed bash for its version when made; the script itself doesn't depend on it.
    script = found.source_template % found(cli, {}, "flipper", "_FLIPPER_COMPLETE").source_vars()
    click.echo(script)
