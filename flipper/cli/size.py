"""`flipper size`: how many trials a margin of error needs."""

from __future__ import annotations

import click

from flipper.cli.options import output_options
from flipper.cli.output import emit
from flipper.errors import UsageError


@click.command(short_help="Trials needed for a margin of error, or the margin they give.")
@click.option("--population", type=click.IntRange(0), required=True, metavar="N", help="Possible faults, in all.")
@click.option("--margin", type=float, metavar="E", help="Half width of the interval.  [default: 0.05]")
@click.option("--confidence", type=float, default=0.95, show_default=True, metavar="C")
@click.option("--strata", type=click.IntRange(1), default=1, show_default=True, metavar="S", help="Claims by part.")
@click.option("--proportion", type=float, default=0.5, show_default=True, metavar="P", help="Expected; 0.5 is safe.")
@click.option("--trials", type=click.IntRange(1), metavar="n", help="Give the margin of this many instead.")
@output_options
def command(
    population: int,
    margin: float | None,
    confidence: float,
    strata: int,
    proportion: float,
    trials: int | None,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
) -> None:
    """Trials needed so that an estimated proportion lies within a margin (Leveugle et al., DATE 2009).

    Each of S strata (layers, fields, ...) of which a claim is made needs its own; N is then divided evenly.

    \b
    Example, the 965,888 bits of a small model and its optimizer:
      flipper size --population 965888 --margin 0.01
    """
    from flipper.statistics.sample_size import margin_reached, trials_needed

    if trials is not None and margin is not None:
        raise UsageError("--margin and --trials exclude each other: one is the answer")
    if strata > max(population, 1):
        raise UsageError(f"--strata: {strata} are more than the population, {population}")
    share = -(-population // strata)
    record = {"population": population, "confidence": confidence, "proportion": proportion, "strata": strata}
    if trials is None:
        wanted = 0.05 if margin is None else margin
        each = trials_needed(share, wanted, confidence, proportion)
        record |= {"margin": wanted, "trials_per_stratum": each, "trials": each * strata}
    else:
        each = trials // strata
        if each == 0:
            raise UsageError(f"--trials: {trials} are fewer than the {strata} strata")
        reached = margin_reached(share, each, confidence, proportion)
        record |= {"margin": reached, "trials_per_stratum": each, "trials": trials}
    emit(record, style)
