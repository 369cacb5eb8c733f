"""`flipper undo`: return a file to its bytes before an injection."""

from __future__ import annotations

from pathlib import Path

import click

from flipper.cli.options import CHECKPOINT, output_options
from flipper.cli.output import emit, say


@click.command(short_help="Return a file to its bytes before an injection.")
@click.argument("file", type=CHECKPOINT)
@click.option("--manifest", type=CHECKPOINT, metavar="M", help="Its record.  [default: the newest beside FILE]")
@output_options
def command(file: Path, manifest: Path | None, style: str | None, quiet: bool, verbose: bool, traceback: bool) -> None:
    """Return FILE to its bytes before the last injection, finished or killed halfway; removes the manifest used,
    unless it is the record of another file that is still there.

    \b
    Example:
      cp sample_checkpoints/digits-cnn.pt /tmp/c.pt
      flipper inject /tmp/c.pt --in-place --seed 1 && flipper undo /tmp/c.pt
    """
    from flipper.injection.undo import undo

    record = undo(file, manifest)
    emit({"file": str(file), "manifest": str(record.path), "seed": record.seed, "elements": len(record.table)}, style)
    kept = record.path is not None and record.path.exists()
    say(f"kept {record.path}, the record of {record.output['path']}" if kept else f"removed {record.path}", quiet)
