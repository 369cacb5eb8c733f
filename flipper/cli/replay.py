"""`flipper replay`: strike the faults of a manifest in another checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from flipper.cli.options import CHECKPOINT, FILE, output_options
from flipper.cli.output import emit, tell_opened
from flipper.cli.progress import progress
from flipper.errors import UsageError


@click.command(short_help="Strike recorded faults in another checkpoint, of any format.")
@click.argument("manifest", type=CHECKPOINT)
@click.argument("ckpt", type=CHECKPOINT)
@click.option("-o", "--output", type=FILE, metavar="OUT", help="The altered copy.")
@click.option("--in-place", is_flag=True, help="Alter CKPT itself.")
@click.option("--rename", "renames", multiple=True, metavar="OLD=NEW", help="PREFIX=... or re:REGEX=... with groups.")
@click.option("--force", is_flag=True, help="Overwrite; in place, go through links too.")
@click.option("--manifest-out", type=FILE, metavar="PATH", help="Where the new record goes.")
@click.option("--keep-checksums", is_flag=True, help="Leave the container's checksums stale.")
@click.option("--sha256", "digests", is_flag=True, help="Record digests of source and output.")
@click.option("--no-provenance", is_flag=True, help="No times, paths and arguments in the manifest.")
@output_options
def command(
    manifest: Path,
    ckpt: Path,
    output: Path | None,
    in_place: bool,
    renames: tuple[str, ...],
    force: bool,
    manifest_out: Path | None,
    keep_checksums: bool,
    digests: bool,
    no_provenance: bool,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
) -> None:
    """Strike the faults recorded in MANIFEST in CKPT; a dtype or shape that doesn't match is refused.

    \b
    Example, the same faults in two formats of one model:
      flipper inject sample_checkpoints/digits-cnn.pt -o /tmp/a.pt --count 5 --seed 1 --force
      flipper replay /tmp/a.pt.flipper.json sample_checkpoints/digits-cnn.h5 -o /tmp/a.h5 --force
    """
    from flipper.checkpoints import open_checkpoint
    from flipper.injection.inject import inject
    from flipper.injection.recording import Record
    from flipper.injection.replay import replay_plan

    if (output is None) == (not in_place):
        raise UsageError("say where the altered copy goes (-o OUT), or --in-place")
    plan = replay_plan(manifest, renames)
    record = Record(manifest_out, not no_provenance, digests, keep_checksums, tuple(sys.argv))
    with open_checkpoint(ckpt) as checkpoint:
        tell_opened(checkpoint, quiet, verbose)
        with progress("striking", checkpoint.size, quiet):
            made = inject(checkpoint, None if in_place else output, plan, force=force, record=record)
    emit(made.summary(), style)
