"""`flipper campaign run`: run a campaign, or go on with it."""

from __future__ import annotations

from pathlib import Path

import click

from flipper.cli.campaign.options import OUT, SET, SPEC_OR_FOLDER, asked, shard_option
from flipper.cli.campaign.progress import follow
from flipper.cli.options import output_options
from flipper.cli.output import emit, say
from flipper.shell_words import path_word


@click.command(short_help="Run it, or go on with it.")
@SPEC_OR_FOLDER
@OUT
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Ranks at once here; on a cluster, runs at once.")
@click.option("--engine", type=click.Choice(["local", "dask", "slurm"]), default="local", help="Where runs are made.")
@click.option("--scheduler", metavar="ADDRESS", help="Of the dask cluster.")
@click.option("--shard", metavar="I/N", help="Only every N-th trial, from the I-th; each shard has its own database.")
@SET
@click.option("--keep", is_flag=True, help="Keep altered checkpoints, under trials/.")
@click.option("--audit", type=click.FloatRange(0, 1), default=0.0, metavar="F", help="Part of the shortened to rerun.")
@output_options
def command(
    where: Path,
    out: Path | None,
    workers: int | None,
    engine: str,
    scheduler: str | None,
    shard: str | None,
    changes: tuple[str, ...],
    keep: bool,
    audit: float,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
) -> None:
    """Run the campaign of a SPEC file in its folder, or go on with what is there, and print what it came to.

    \b
    Example:
      flipper campaign run scripts/campaigns/demo.toml --set axes.count=1,10
    """
    from flipper.campaigns.engines import open_engine
    from flipper.campaigns.run import run_campaign

    campaign, part = asked(where, out, changes), shard_option(shard)
    folder = campaign.folder.path
    try:
        with open_engine(engine, workers, scheduler, campaign=campaign) as place, follow(quiet) as on_progress:
            progress = run_campaign(campaign, place, shard=part, keep=keep, audit=audit, on_progress=on_progress)
    except (KeyboardInterrupt, SystemExit):
        say("ended early; what had finished is kept, and the same command goes on from there", quiet)
        raise
    what = "report" if part is None else "merge"
    does = "shows them" if part is None else "joins those of all shards"
    say(f"results are in {campaign.folder.results(part)}; `flipper campaign {what} {path_word(folder)}` {does}", quiet)
    emit(
        {
            "folder": str(folder),
            "cells": len(campaign.cells),
            "trials": sum(progress.outcomes.values()),
            "outcomes": dict(progress.outcomes),
            "reused": progress.reused,
            "ended_early": progress.ended_early,
        },
        style,
    )
