"""`flipper campaign merge`: join the results of shards."""

from __future__ import annotations

from pathlib import Path

import click

from flipper.cli.campaign.options import FOLDER, SPEC_OR_FOLDER, asked
from flipper.cli.options import output_options
from flipper.cli.output import emit, say


@click.command(short_help="Join the results of shards.")
@SPEC_OR_FOLDER
@click.argument("others", metavar="[FOLDER]...", nargs=-1, type=FOLDER)
@output_options
def command(
    where: Path,
    others: tuple[Path, ...],
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
) -> None:
    """Join what the shards of a campaign, and other FOLDERs of the same campaign, have into its results.

    A shard that goes on is joined by merging once more.

    \b
    Example:
      flipper campaign merge dp-vs-mp
    """
    from flipper.campaigns.merge import merge
    from flipper.campaigns.store import numbers_there

    campaign = asked(where, None, ())
    joined = merge(campaign, others)
    there = numbers_there(campaign.folder.results())
    trials = {cell.number: len(there.get(("trial", cell.number), ())) for cell in campaign.cells}
    open_ended = campaign.spec.census or campaign.spec.margin is not None
    say(f"joined {len(joined)} databases into {campaign.folder.results()}", quiet)
    emit(
        {
            "folder": str(campaign.folder.path),
            "trials": sum(trials.values()),
            "missing": None if open_ended else sum(max(0, c.trials - trials[c.number]) for c in campaign.cells),
            "joined": [
                {
                    "database": str(each.path),
                    "trials": each.held["trial"],
                    "null_trials": each.held["null"],
                    "audits": each.held["audit"],
                    "goldens": each.held["golden"],
                    "new_runs": each.new,
                }
                for each in joined
            ],
        },
        style,
    )
