"""`flipper inject`: strike a checkpoint, in an altered copy or in place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from flipper.cli.options import (
    CHECKPOINT,
    FILE,
    drawing_options,
    fault_model,
    output_options,
    seed_option,
    selection_options,
)
from flipper.cli.output import emit, emit_rows, say, tell_opened
from flipper.cli.progress import progress
from flipper.errors import UsageError

SPARE = (("index", "file", "mask"), ("aliases", "offset", "value", "op", "dtype", "before", "after", "fields"))


@click.command(short_help="Flip bits: write an altered copy, or alter in place.")
@click.argument("ckpt", type=CHECKPOINT)
@click.option("-o", "--output", type=FILE, metavar="OUT", help="The altered copy; a directory for a directory.")
@click.option("--in-place", is_flag=True, help="Alter CKPT itself; `flipper undo` takes it back.")
@selection_options
@drawing_options
@seed_option
@click.option("--plan", "plan_file", metavar="FILE|-", help="Faults to make instead of drawing: JSON lines or CSV.")
@click.option("--dry-run", is_flag=True, help="Print the faults, before and after; write nothing.")
@click.option("--force", is_flag=True, help="Overwrite; in place, go through links too.")
@click.option("--manifest", type=FILE, metavar="PATH", help="Where the record goes.  [default: OUT.flipper.json]")
@click.option("--keep-checksums", is_flag=True, help="Leave the container's checksums stale.")
@click.option("--sha256", "digests", is_flag=True, help="Record digests of source and output.")
@click.option("--no-provenance", is_flag=True, help="No times, paths and arguments in the manifest.")
@click.option("--sync", is_flag=True, help="Flush the copy to the disk.")
@output_options
def command(
    ckpt: Path,
    output: Path | None,
    in_place: bool,
    seed: int | None,
    plan_file: str | None,
    dry_run: bool,
    force: bool,
    manifest: Path | None,
    keep_checksums: bool,
    digests: bool,
    no_provenance: bool,
    sync: bool,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
    **options: Any,
) -> None:
    """Strike CKPT by faults that are drawn, or taken from --plan, and record them in a manifest.

    \b
    Example, one flip of the top exponent bit in one layer:
      flipper inject sample_checkpoints/digits-cnn.pt -o /tmp/bad.pt --layer fc --bits exponent-msb --seed 7 --force
    """
    from flipper.checkpoints import open_checkpoint
    from flipper.injection.changes import changes_of
    from flipper.injection.inject import inject
    from flipper.injection.recording import Record, manifest_path, recorded_table
    from flipper.injection.table import COLUMNS

    if output is None and not in_place and not dry_run:
        raise UsageError("say where the altered copy goes (-o OUT), or --in-place, or --dry-run")
    if output is not None and in_place:
        raise UsageError("-o and --in-place exclude each other")
    with open_checkpoint(ckpt) as checkpoint:
        plan = _plan(checkpoint, plan_file, seed, options, quiet)
        tell_opened(checkpoint, quiet, verbose)
        if dry_run:
            changes = changes_of(checkpoint, plan)
            target = output or ckpt
            table = recorded_table(checkpoint, changes, target, manifest or manifest_path(target))
            emit_rows(table.rows(), style, COLUMNS, spare=SPARE)
            return
        record = Record(manifest, not no_provenance, digests, keep_checksums, tuple(sys.argv))
        with progress("striking", checkpoint.size * (3 if digests else 1), quiet):
            made = inject(checkpoint, None if in_place else output, plan, force=force, sync=sync, record=record)
    emit(made.summary(), style)


def _plan(checkpoint: Any, plan_file: str | None, seed: int | None, options: dict[str, Any], quiet: bool) -> Any:
    from flipper.faults.draw import draw, new_seed
    from flipper.faults.plan_file import read_plan

    if plan_file is not None:
        if seed is not None or any(value is not None and value != () for value in options.values()):
            raise UsageError("--plan says which faults; leave out selection, amount and seed")
        return read_plan(Path(plan_file), checkpoint, sys.stdin if plan_file == "-" else None)
    drawn = new_seed() if seed is None else seed
    plan = draw(checkpoint, fault_model(options), drawn)
    if seed is None:
        say(f"seed {drawn}", quiet)
    return plan
