"""`flipper train`: train a recipe under a parallel layout, resume it, or check that resuming is exact."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from flipper.cli.options import CHECKPOINT, FILE, output_options
from flipper.cli.output import emit, emit_rows, say
from flipper.cli.progress import step_bar
from flipper.errors import UsageError

if TYPE_CHECKING:
    from flipper.failstop.spec import FailstopSpec
    from flipper.training.spec import Event, TrainSpec

Listener = Callable[["Event"], None]

DIFFERS: Final = 3

DEATHS: Final = ("recovery", "min_ranks", "peer_copies", "peer_every", "world_batch", "world_rate", "lost_share")
"""Options on ranks that die: fields of FailstopSpec."""


AUTO: Final = "auto"


def _steps(context: click.Context, option: click.Parameter, value: str | None) -> int | str | None:
    """A number of steps, or `auto`."""
    if value is None or value == AUTO:
        return value
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise click.BadParameter(f"{value!r} is neither a whole number from 1 nor {AUTO!r}", context, option)
    return int(value)


@click.command(short_help="Train a recipe, or resume it, in one parallel layout.")
@click.argument("recipe", required=False)
@click.option(
    "--parallel",
    metavar="LAYOUT",
    default="single",
    help="single, ddp:N, hooks:N, fsdp:N, tensor:N ...  [default: single]",
)
@click.option("--epochs", type=click.IntRange(0), metavar="N", help="Epochs from the beginning.  [default: recipe's]")
@click.option("--steps", type=click.IntRange(0), metavar="N", help="Steps from the beginning, instead of epochs.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Drawn, or the checkpoint's, without it.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where ranks compute.")
@click.option("--resume", type=CHECKPOINT, metavar="CKPT", help="Go on from there, to the same total.")
@click.option("--save", type=FILE, metavar="DIR", help="Write a checkpoint at the end to this folder.")
@click.option("--save-every", callback=_steps, metavar="N|auto", help="Also every N steps; auto: as --mtbf makes best.")
@click.option("--mtbf", metavar="DURATION", help="Mean time between failures of the job: 90s, 15min, 2h, 1.5d.")
@click.option("--checkpoint-format", metavar="F", default="safetensors", help="safetensors, pytorch, hdf5 or dcp.")
@click.option("--metrics", type=FILE, metavar="FILE", help="Write JSON lines while training.")
@click.option("--data-dir", type=FILE, metavar="DIR", help="Where data lies that no package brings.")
@click.option("--allreduce", metavar="HOW", default="ordered", help="ordered, native or mesh:RxC.  [default: ordered]")
@click.option("--failed", multiple=True, metavar="HOLE", help="Chips of that mesh: r,c or HxW@r,c; repeatable.")
@click.option("--inject", type=CHECKPOINT, metavar="FAULTS", help="Strike live state: a manifest, or a TOML table.")
@click.option("--at", type=click.IntRange(0), metavar="STEP", help="The step after which --inject strikes.")
@click.option(
    "--reach",
    metavar="COPIES",
    default="all",
    help="Replicas that --inject strikes: all, one or rank:R.  [default: all]",
)
@click.option("--probe-every", type=click.IntRange(1), metavar="N", help="Compare the replicas every N steps.")
@click.option(
    "--detect",
    multiple=True,
    metavar="NAME",
    help="One more detector: nonfinite-state, replicas or replay; repeatable.",
)
@click.option(
    "--timeout", type=click.FloatRange(0.1, 1e6), default=300.0, metavar="SECONDS", help="To wait for a silent rank."
)
@click.option(
    "--kill", "kills", multiple=True, metavar="WHO@WHEN", help="Kill a rank: rank:1@step:20[:bucket:2]; repeatable."
)
@click.option(
    "--recovery", type=click.Choice(["restart", "rollback", "lossy"]), help="How training goes on when a rank dies."
)
@click.option(
    "--min-ranks", type=click.IntRange(1), metavar="N", help="End it with fewer survivors left.  [default: 1]"
)
@click.option(
    "--peer-copies", type=click.IntRange(0), metavar="N", help="Copies of each rank's state in others' memory."
)
@click.option(
    "--peer-every", type=click.IntRange(1), metavar="N", help="Renew those copies every N steps.  [default: 1]"
)
@click.option(
    "--world-batch",
    type=click.Choice(["fixed", "per-rank"]),
    help="Survivors share the whole batch, or keep their own parts.  [default: fixed]",
)
@click.option(
    "--world-rate",
    type=click.Choice(["keep", "linear"]),
    help="Their learning rate: kept, or in proportion to the batch.  [default: keep]",
)
@click.option(
    "--lost-share",
    type=click.Choice(["drop", "zero"]),
    help="A dead rank's part of a lossy mean: left out, or zeros.  [default: drop]",
)
@click.option("--control", is_flag=True, help="Stop midway, resume, compare with an uninterrupted run.")
@click.option("--list", "list_recipes", is_flag=True, help="List the built-in recipes.")
@output_options
def command(
    recipe: str | None,
    list_recipes: bool,
    metrics: Path | None,
    control: bool,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
    kills: tuple[str, ...],
    **options: Any,
) -> None:
    """Train RECIPE on this machine, under one parallel layout, and print one record at the end.

    \b
    Example: resume on two ranks, data-parallel
      flipper train digits-cnn --resume sample_checkpoints/digits-cnn.pt --epochs 4 --parallel ddp:2
    """
    from flipper.training.ranks import outer_rank
    from flipper.training.recipes import BUILT_IN

    if list_recipes:
        rows = ({"name": name, "summary": summary} for name, (_, _, summary) in BUILT_IN.items())
        emit_rows(rows, style, ("name", "summary"))
        return
    if recipe is None:
        raise UsageError(f"name a RECIPE: {', '.join(BUILT_IN)} (flipper train --list describes them)")
    deaths = {name: value for name in DEATHS if (value := options.pop(name)) is not None}
    first = not outer_rank()  # of torchrun's ranks, number 0 speaks
    spec = _spec(recipe, quiet or not first, **options)
    job = _failstop(spec, control, kills, deaths)
    with _listeners(metrics if first else None, quiet or not first) as hear:
        record, exact = _run(spec, job, control, hear, verbose)
    if first:
        emit(record, style)
    if not exact:
        sys.exit(DIFFERS)


def _spec(
    recipe: str,
    quiet: bool,
    parallel: str,
    save_every: int | str | None,
    mtbf: str | None,
    probe_every: int | None,
    inject: Path | None,
    **given: Any,
) -> TrainSpec:
    """The run that the options ask for; draws the seed where none is given."""
    from flipper.training.faults_file import read_faults
    from flipper.training.layouts import Parallel
    from flipper.training.spec import TrainSpec

    drawn = given["seed"] is None and given["resume"] is None
    if drawn:
        given["seed"] = secrets.randbits(64)
    if inject is None and given["reach"] != "all":
        raise UsageError("--reach says which copies --inject strikes: give both")
    faults = None if inject is None else read_faults(inject)
    layout = Parallel.parse(parallel)
    every, seconds = _interval(save_every, mtbf)
    spec = TrainSpec(
        recipe, layout, save_every=every, mtbf=seconds, probe_every=probe_every or 0, inject=faults, **given
    )
    if drawn:
        say(f"seed {spec.seed}", quiet)
    if (mesh := spec.summing.mesh) is not None:
        schedule = mesh.schedule()
        say(f"allreduce by {schedule.algorithm} on {schedule.mesh.shape}: {schedule.variant}", quiet)
    if spec.allreduce == "native" and spec.parallel.data_size > 2:
        warning = "with --allreduce native on more than 2 ranks a resumed run is not exact: sums depend on buckets"
        say(f"warning: {warning}", quiet)
    return spec


def _interval(save_every: int | str | None, mtbf: str | None) -> tuple[int, float | None]:
    """Steps between checkpoints, 0 for none, and the seconds between failures that they are to be worked out from."""
    from flipper.failstop.failures import seconds_of

    if (save_every == AUTO) != (mtbf is not None):
        raise UsageError("--save-every auto works the interval out from --mtbf DURATION: give both")
    return int(save_every or 0) if save_every != AUTO else 0, None if mtbf is None else seconds_of(mtbf, "--mtbf")


def _failstop(spec: TrainSpec, check: bool, kills: tuple[str, ...], options: dict[str, Any]) -> FailstopSpec | None:
    """The run with what is done when ranks die; None where that wasn't asked for."""
    if not kills and not options and spec.parallel.data != "mpi":
        return None
    from flipper.failstop.kills import Kill
    from flipper.failstop.spec import FailstopSpec

    if "recovery" not in options and (kills or options):
        raise UsageError("say by --recovery what is done when a rank dies: restart, rollback or lossy")
    if check:
        raise UsageError("--control works under the other layouts, in runs in which nobody dies: leave it out")
    return FailstopSpec(spec, tuple(map(Kill.parse, kills)), **options)


def _run(
    spec: TrainSpec, job: FailstopSpec | None, check: bool, hear: Listener, verbose: bool
) -> tuple[dict[str, object], bool]:
    """The record of the run or of its control, and whether the control held."""
    if job is not None:
        from flipper.failstop.run import train_through

        return train_through(job, hear, verbose=verbose).record(), True
    if check:
        from flipper.training.control import control

        verdict = control(spec, hear, verbose=verbose)
        return verdict.record(), verdict.first_difference is None
    from flipper.training.run import train

    return train(spec, hear, verbose=verbose).record(), True


@contextmanager
def _listeners(metrics: Path | None, quiet: bool) -> Iterator[Listener]:
    """What hears of each event: the metrics file, and stderr."""
    from flipper.training.metrics import MetricsFile

    with ExitStack() as stack:
        listeners: list[Listener] = []
        if metrics is not None:
            listeners.append(stack.enter_context(MetricsFile(metrics)).write)
        if not quiet:
            listeners.append(stack.enter_context(_progress_bar()) if sys.stderr.isatty() else _say_saved)

        def hear(event: Event) -> None:
            for listener in listeners:
                listener(event)

        yield hear


def _say_saved(event: Event) -> None:
    if event["event"] == "saved":
        say(f"wrote {event['path']}")


@contextmanager
def _progress_bar() -> Iterator[Listener]:
    """A bar on stderr that follows the steps, for a terminal."""
    with step_bar() as (progress, task):

        def follow(event: Event) -> None:
            if event["event"] == "start":
                progress.update(task, total=event["steps"], completed=event["step"])
            elif event["event"] == "step":
                progress.update(task, completed=event["step"], description=f"loss {event['loss']:.4f}")
            elif event["event"] == "saved":
                progress.console.print(f"wrote {event['path']}", highlight=False, markup=False, soft_wrap=True)

        yield follow
