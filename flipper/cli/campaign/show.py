"""`flipper campaign show`: the plan before it runs."""

from __future__ import annotations

from pathlib import Path

import click

from flipper.cli.campaign.options import SET, SPEC_OR_FOLDER
from flipper.cli.options import output_options
from flipper.cli.output import emit_rows, format_or_default, say


@click.command(short_help="Print the plan: cells, trials, margin, expected hours.")
@SPEC_OR_FOLDER
@SET
@click.option("--no-timing", is_flag=True, help="Don't run anything: leave out the expected hours.")
@output_options
def command(
    where: Path,
    changes: tuple[str, ...],
    no_timing: bool,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
) -> None:
    """Print the cells of a campaign, and how long it will take: a golden run and a trial of two layouts are timed."""
    from flipper.campaigns.cells import cells_of
    from flipper.campaigns.folder import Campaign, Folder, open_campaign
    from flipper.campaigns.show import overview, plan_rows, timed
    from flipper.campaigns.spec import read_spec
    from flipper.errors import UsageError

    if where.is_dir():
        if changes:
            raise UsageError("--set goes with a SPEC; a folder says itself what it is")
        campaign = open_campaign(where)
    else:
        spec = read_spec(where, changes)
        campaign = Campaign(Folder(Path(spec.name)), spec, cells_of(spec))
    rows, facts = plan_rows(campaign), overview(campaign)
    if not no_timing:
        facts |= timed(campaign)
    emit_rows(rows, style, tuple(rows[0]), document=(facts, "plan", {}))
    if format_or_default(style) != "json":
        for name, value in facts.items():
            say(f"{name.replace('_', ' ')}: {value}", quiet)
