"""`flipper inspect`: the tensors of a checkpoint, and how many bits can be struck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flipper.cli.options import CHECKPOINT, fault_model, output_options, selection_options
from flipper.cli.output import emit_rows, format_or_default, say, tell_opened
from flipper.cli.progress import watched

COLUMNS = (
    "name", "aliases", "layer", "role", "dtype", "shape", "elements", "bytes", "file", "offset", "storage", "reason",
)  # fmt: skip
SPARE = (
    ("layer", "file"),
    ("aliases", "bytes", "offset", "elements", "reason", "storage", "role", "shape", "dtype"),
)
STATISTICS = ("min", "max", "mean", "std", "zeros", "nans", "infs")


@click.command(short_help="List the tensors of a checkpoint and count the bits that can be struck.")
@click.argument("ckpt", type=CHECKPOINT)
@selection_options
@click.option("--stats", is_flag=True, help="Add minimum, maximum, mean, ... of every tensor; reads all data.")
@output_options
def command(
    ckpt: Path, stats: bool, style: str | None, quiet: bool, verbose: bool, traceback: bool, **options: Any
) -> None:
    """List the tensors of CKPT, integers included, and count the bits that can be struck.

    \b
    Example:
      flipper inspect sample_checkpoints/digits-cnn.pt --bits exponent
    """
    from flipper.checkpoints import open_checkpoint
    from flipper.checkpoints.describe import describe
    from flipper.faults.draw import population_of

    model = fault_model(options)
    with open_checkpoint(ckpt) as checkpoint:
        population = population_of(checkpoint, model).record()
        tensors = model.selection.apply(checkpoint.tensors)
        described = (describe(checkpoint, tensor, stats) for tensor in tensors)
        rows = watched(described, "reading", sum(tensor.nbytes for tensor in tensors) if stats else 0, style, quiet)
        head = {"path": str(ckpt), "format": checkpoint.format, "size": checkpoint.size}
        document = (head, "tensors", {"population": population})
        emit_rows(rows, style, COLUMNS + (STATISTICS if stats else ()), document, SPARE)
        tell_opened(checkpoint, quiet, verbose)
    if format_or_default(style) != "json":
        say(
            f"population: {population['bits']:,} bits in {population['elements']:,} elements"
            + "".join(f", {role} {bits:,}" for role, bits in population["bits_by_role"].items()),
            quiet,
        )
