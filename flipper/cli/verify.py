"""`flipper verify`: does a checkpoint hold together, and is it what a manifest says."""

from __future__ import annotations

from pathlib import Path

import click

from flipper.cli.options import CHECKPOINT, output_options
from flipper.cli.output import emit, say
from flipper.cli.progress import progress, size_of


@click.command(short_help="Check a container, and that exactly the recorded faults were made.")
@click.argument("file", type=CHECKPOINT)
@click.option("--manifest", type=CHECKPOINT, metavar="M", help="Check that its faults were made.")
@click.option("--source", type=CHECKPOINT, metavar="CKPT", help="Check that nothing else was changed.")
@output_options
def command(
    file: Path,
    manifest: Path | None,
    source: Path | None,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
) -> None:
    """Check FILE's header, offsets and checksums; with a manifest, that its faults were made; with the source, that
    nothing else was. Exit code 0 when all holds, 3 when not.

    \b
    Example:
      flipper verify sample_checkpoints/digits-cnn.pt
    """
    from flipper.injection.verify import explain, verify

    with progress("checking", size_of(file, source), quiet):
        verdict = verify(file, manifest, source)
    emit(verdict.record(), style)
    say(explain(verdict), quiet)
    if verdict.problems:
        raise SystemExit(3)
