"""`flipper convert`: the same checkpoint in another format."""

from __future__ import annotations

from pathlib import Path

import click

from flipper.cli.options import CHECKPOINT, FILE, output_options
from flipper.cli.output import emit, say, tell_opened
from flipper.cli.progress import progress

FORMATS = ("safetensors", "pytorch", "hdf5")


@click.command(short_help="Write a checkpoint in another format, without loss.")
@click.argument("ckpt", type=CHECKPOINT)
@click.option("-o", "--output", type=FILE, required=True, metavar="OUT", help="The file to write.")
@click.option("--to", type=click.Choice(FORMATS), required=True, help="Its format.")
@click.option("--drop-unsupported", is_flag=True, help="Leave out what OUT can't hold instead of refusing.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@output_options
def command(
    ckpt: Path,
    output: Path,
    to: str,
    drop_unsupported: bool,
    force: bool,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
) -> None:
    """Write CKPT to OUT in another format: all tensors, names, dtypes, ties, nesting and scalars.

    Objects of classes that flipper doesn't know, and quantised tensors, can't be carried: they are refused, or left
    out and named with --drop-unsupported. Views that overlap become tensors of their own, and are named. Modules,
    namespaces and packed sequences become the dicts and tuples that they hold.

    \b
    Example:
      flipper convert sample_checkpoints/digits-cnn.pt -o /tmp/digits-cnn.h5 --to hdf5 --force
    """
    from flipper.checkpoints import open_checkpoint
    from flipper.checkpoints.convert import convert

    with open_checkpoint(ckpt) as checkpoint:
        tell_opened(checkpoint, quiet, verbose)
        with progress(f"converting to {to}", checkpoint.size, quiet):
            record = convert(checkpoint, output, to, force, drop_unsupported)
    for loss in record["dropped"]:
        say(f"left out: {loss}", quiet)
    if record["unfolded"]:
        say(f"note: views that overlap in {ckpt} are apart in {output}: {_listed(record['unfolded'])}", quiet)
    say(f"wrote {output}", quiet)
    emit(record, style)


def _listed(names: list[str]) -> str:
    """The first names of many."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
