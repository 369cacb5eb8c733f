"""`flipper simulate`: what each way to go on after a death costs in accuracy and in time."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from flipper.cli.options import CHECKPOINT, FILE, output_options
from flipper.cli.output import emit_rows, say
from flipper.cli.progress import step_bar
from flipper.errors import UsageError

if TYPE_CHECKING:
    from flipper.failstop.simulate import SimulationSpec
    from flipper.training.spec import Event

COLUMNS: Final = (
    "strategy", "failures", "final_loss", "final_accuracy", "accuracy_loss", "compute_seconds", "overhead_seconds",
    "overhead_fraction", "world_size_end", "save_every", "state_digest", "error",
)  # fmt: skip
SWEPT: Final = (
    "kind", "mtbf_seconds", "failures_per_hour", "strategy", "against", "quantity", "draws", "ended_early", "failures",
    "runs", "overhead_fraction", "overhead_fraction_low", "overhead_fraction_high", "accuracy_loss",
    "accuracy_loss_low", "accuracy_loss_high", "world_size_end", "save_every", "break_even_mtbf_seconds",
    "break_even_low", "break_even_high", "break_even_failures_per_hour", "verdict",
)  # fmt: skip
REPEAT: Final = 5
DRAWS: Final = 100
"""Seeds of a sweep: of runs that are computed, and of those that are only timed."""


@click.command(short_help="Simulate many workers that die, and what each recovery costs.")
@click.argument("recipe")
@click.option("--workers", type=click.IntRange(2), required=True, metavar="W", help="How many there are.")
@click.option("--steps", type=click.IntRange(1), required=True, metavar="N", help="Steps from the beginning.")
@click.option(
    "--recovery",
    default="restart,rollback,lossy",
    metavar="S[,S...]",
    help="restart, rollback, lossy.  [default: all three]",
)
@click.option(
    "--mtbf",
    metavar="DURATION",
    help="Mean time between failures of the whole job: 90s, 15min, 2h, 1.5d of simulated time.",
)
@click.option("--sweep-mtbf", metavar="D,D[,D...]", help="Several instead: the trade-off, and where two break even.")
@click.option("--repeat", type=click.IntRange(1), metavar="N", help="Seeds of a sweep, from --seed on.  [default: 5]")
@click.option("--draws", type=click.IntRange(1), metavar="N", help="Seeds that only time is taken of.  [default: 100]")
@click.option("--report", type=FILE, metavar="FILE", help="Write the sweep as an HTML page, too.")
@click.option("--shape", type=float, metavar="K", help="Of a Weibull distribution.  [default: 1, exponential]")
@click.option("--trace", type=CHECKPOINT, metavar="FILE", help="Take failures from a CSV file of seconds,worker.")
@click.option("--costs", type=CHECKPOINT, metavar="FILE", help="What things take (TOML), as --calibrate prints it.")
@click.option("--calibrate", is_flag=True, help="Measure that on this machine first, and print it.")
@click.option(
    "--mode",
    type=click.Choice(["exact", "batched"]),
    default="exact",
    help="One worker after another, or many at once.  [default: exact]",
)
@click.option(
    "--batch-size", type=click.IntRange(1), metavar="N", help="Samples a step, of all workers.  [default: recipe's]"
)
@click.option(
    "--save-every", type=click.IntRange(1), metavar="N", help="Steps between checkpoints; without it by Young and Daly."
)
@click.option(
    "--min-ranks", type=click.IntRange(1), default=1, metavar="N", help="End a run where fewer workers are left."
)
@click.option(
    "--world-batch",
    type=click.Choice(["fixed", "per-rank"]),
    default="fixed",
    help="Survivors share the whole batch, or keep their own parts.  [default: fixed]",
)
@click.option(
    "--world-rate",
    type=click.Choice(["keep", "linear"]),
    default="keep",
    help="Their learning rate: kept, or in proportion to the batch.  [default: keep]",
)
@click.option(
    "--lost-share",
    type=click.Choice(["drop", "zero"]),
    default="drop",
    help="A dead worker's part of a lossy mean: left out, or zeros.  [default: drop]",
)
@click.option("--resume", type=CHECKPOINT, metavar="CKPT", help="Begin with this state.")
@click.option("--data-dir", type=FILE, metavar="DIR", help="Where data lies that no package brings.")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Of training and failures; drawn without it."
)
@output_options
def command(
    recipe: str,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
    sweep_mtbf: str | None,
    repeat: int | None,
    draws: int | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Train RECIPE on W simulated workers that fail, by each recovery, and print a row for each.

    The gradients are computed faithfully; the time is charged by a cost model. --sweep-mtbf compares the recoveries
    over several failure rates and seeds.

    \b
    Example:
      flipper simulate digits-mlp --workers 8 --steps 80 --mtbf 1s --seed 1 --calibrate
    """
    from flipper.failstop.simulate import simulate

    if sweep_mtbf is None and (repeat, draws, report) != (None, None, None):
        raise UsageError("--repeat, --draws and --report are of a sweep: give --sweep-mtbf D,D[,D...]")
    if sweep_mtbf is not None:
        _sweep(recipe, style, quiet, sweep_mtbf, (repeat or REPEAT, draws or DRAWS), report, options)
        return
    spec = _spec(recipe, quiet, **options)
    with _following(quiet) as follow:
        rows = simulate(spec, follow)
    emit_rows(iter(rows), style, COLUMNS)


def _sweep(
    recipe: str, style: str | None, quiet: bool, durations: str, seeds: tuple[int, int], page: Path | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    from flipper.failstop.failures import seconds_of
    from flipper.failstop.sweep import sweep
    from flipper.report.trade_off import check_page, write_page

    if options["mtbf"] is not None or options["trace"] is not None:
        raise UsageError("--sweep-mtbf takes the place of --mtbf and --trace: leave them out")
    mtbfs = [seconds_of(each, "--sweep-mtbf") for each in durations.split(",")]
    if page is not None:
        check_page(page)
    shape = options["shape"]
    spec = _spec(recipe, quiet, **{**options, "mtbf": durations.split(",")[0]})
    with _following(quiet) as follow:
        found = sweep(spec, mtbfs, *seeds, 1.0 if shape is None else shape, follow)
    emit_rows(iter(found.rows()), style, SWEPT)
    if page is not None:
        write_page(found, page)
        say(f"wrote {page}", quiet)


def _spec(
    recipe: str,
    quiet: bool,
    workers: int,
    steps: int,
    recovery: str,
    mtbf: str | None,
    shape: float | None,
    trace: Path | None,
    costs: Path | None,
    calibrate: bool,
    seed: int | None,
    resume: Path | None,
    data_dir: Path | None,
    **rest: Any,
) -> SimulationSpec:
    from flipper.failstop.costs import Costs
    from flipper.failstop.failures import Drawn, Failures, Trace, seconds_of
    from flipper.failstop.simulate import SimulationSpec
    from flipper.training.spec import TrainSpec

    if (mtbf is None) == (trace is None):
        raise UsageError("give --mtbf DURATION, to draw failures, or --trace FILE with them, and not both")
    if shape is not None and mtbf is None:
        raise UsageError("--shape is that of the distribution that --mtbf draws from: give both")
    if calibrate and costs is not None:
        raise UsageError("--calibrate measures what --costs gives: leave one out")
    if seed is None:
        seed = secrets.randbits(64)
        say(f"seed {seed}", quiet)
    train = TrainSpec(recipe, steps=steps, seed=seed, resume=resume, data_dir=data_dir)
    between = None if mtbf is None else seconds_of(mtbf, "--mtbf")
    failures: Failures
    if trace is not None:
        failures = Trace.read(trace, workers)
    else:
        failures = Drawn(between or 0.0, workers, seed, 1.0 if shape is None else shape)
    if calibrate:
        from flipper.failstop.calibrate import calibrated

        known = calibrated(train)
        for line in known.text().splitlines():
            say(line, quiet)
    elif costs is not None:
        known = Costs.load(costs)
    else:
        raise UsageError("say what things take: --calibrate measures it here, --costs FILE gives it")
    return SimulationSpec(train, workers, tuple(recovery.split(",")), failures, known, mtbf=between, **rest)


@contextmanager
def _following(quiet: bool) -> Iterator[Callable[[Event], None]]:
    """A bar on stderr, for a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda event: None
        return
    with step_bar() as (progress, task):

        def follow(event: Event) -> None:
            if event["event"] == "simulated":
                progress.update(task, total=event["steps"], completed=event["step"], description=event["strategy"])

        yield follow
