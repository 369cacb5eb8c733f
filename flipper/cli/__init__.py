"""The command line: one file per command; this one finds them without importing them."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Final, NoReturn

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
    "simulate": "Simulate many workers that die, and what each recovery costs.",
    "campaign": "Run thousands of trials and compare what they come to.",
    "study": "Study what resilience costs: checkpoints, allreduce round failed chips.",
    "completion": "Print the completion script for a shell.",
}
"""Command -> its short help. The command `x` is `command` in flipper/cli/x.py; a test keeps both in step."""


class LazyGroup(click.Group):
    """A group that lists its commands from a table and imports one only to run it.

    table: command -> its short help. package: where the modules of their names lie, each with its `command`.
    """

    table: dict[str, str] = COMMANDS
    package = "flipper.cli"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.table:
            return None
        command: click.Command = import_module(f"{self.package}.{name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.table and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            close = get_close_matches(name, self.table)
            ctx.fail(f"no command {name!r}; " + (f"did you mean {' or '.join(close)}?" if close else
                                                 f"known: {', '.join(self.table)}"))  # fmt: skip
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.table.items()))


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="flipper-ckpt", prog_name="flipper")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Flip bits in deep-learning checkpoints and measure what they do to training."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; any error ends as one clear line, or two, and its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    gc.set_threshold(100_000)  # thousands of tensors hold no cycles; looking for them costs a tenth of opening them
    _prepare_streams()
    with _unwound_by_signals():
        try:
            code = cli.main(arguments, prog_name="flipper", standalone_mode=False)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(128 + signal.SIGINT)
        except Exception as error:
            sys.exit(_told(error, "--traceback" in arguments))
    sys.exit(code)


def _told(error: Exception, traceback: bool) -> int:
    """Say what went wrong; returns the exit code."""
    from flipper.cli.output import printable
    from flipper.errors import FlipperError

    hint = ""
    if traceback and not isinstance(error, click.ClickException):
        sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, FlipperError):
        code, message = error.exit_code, str(error)
    elif isinstance(error, click.ClickException):
        code, message = error.exit_code, " ".join(error.format_message().split())
        context = getattr(error, "ctx", None)
        hint = f"\nTry '{context.command_path} --help' for help." if context is not None else ""
    elif isinstance(error, OSError) and error.strerror:  # of stdout, mostly: a full disk
        code, message = 1, f"{error.filename or 'stdout'}: {error.strerror}"
        if error.filename is None:
            _drop_output()
    else:
        code, message = 1, f"internal error: {type(error).__name__}: {error}; --traceback shows where, please report it"
    click.echo(f"flipper: error: {printable(message)}{hint}", err=True)
    return code


def _drop_output() -> None:
    """Let what stdout still holds go nowhere: Python would try to write it once more at the end, and say so."""
    with suppress(OSError, ValueError):  # it may have no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _prepare_streams() -> None:
    """What can't be encoded (a name that isn't Unicode) is escaped; a stream that the caller closed swallows all."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.StringIO())
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, so that temporary files go; exit code 128 + signal."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ours = [number for number, handler in former.items() if handler is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        ours = []
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, former[number])
