"""`flipper train`: train a recipe under a parallel layout, resume it, or check that resuming is exact."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from flipper.errors import UsageError

if TYPE_CHECKING:
    from flipper.training.spec import Event, TrainSpec

DEFAULT_EPOCHS: Final = 10


@click.command(short_help="Train a recipe, or resume it, in one parallel layout.")
@click.argument("recipe", required=False)
@click.option("--parallel", metavar="LAYOUT", default="single", help="single, ddp:N or pipeline:N.")
@click.option(
    "--epochs", type=click.IntRange(0), help=f"Epochs in all, from the beginning [{DEFAULT_EPOCHS}]."
)
@click.option("--steps", type=click.IntRange(0), help="Steps in all, from the beginning, instead of epochs.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Training seed [drawn, or the checkpoint's].")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where ranks compute."
)
@click.option(
    "--resume", type=click.Path(exists=True, path_type=Path), metavar="CKPT", help="Go on from there."
)
@click.option(
    "--save", type=click.Path(path_type=Path), metavar="DIR", help="Write checkpoints to this folder."
)
@click.option(
    "--save-every", type=click.IntRange(1), metavar="N", help="Save every N steps, not only at the end."
)
@click.option(
    "--checkpoint-format", default="safetensors", help="safetensors, pytorch or hdf5.", metavar="FORMAT"
)
@click.option(
    "--metrics", type=click.Path(path_type=Path), metavar="FILE", help="Write JSON lines while training."
)
@click.option(
    "--timeout", type=click.FloatRange(0.1), default=300.0, metavar="SECONDS", help="For a silent rank."
)
@click.option("--control", is_flag=True, help="Stop midway, resume, compare with an uninterrupted run.")
@click.option("--list", "list_recipes", is_flag=True, help="List the built-in recipes.")
@click.option("-q", "--quiet", is_flag=True)
@click.option("-v", "--verbose", is_flag=True)
@click.option("--traceback", is_flag=True)
def command(
    recipe: str | None, list_recipes: bool, metrics: Path | None, quiet: bool, **options: Any
) -> None:
    """Train RECIPE on this machine, under one parallel layout, and print one record at the end.

    \b
    Resume a checkpoint on two ranks, data-parallel:
      flipper train digits-cnn --resume sample_checkpoints/digits-cnn.pt --epochs 4 --parallel ddp:2
    """
    from flipper.training.metrics import strict
    from flipper.training.recipes import BUILT_IN

    if list_recipes:
        for name, (_, _, summary) in BUILT_IN.items():
            click.echo(f"{name}  {summary}")
        return
    if recipe is None:
        raise UsageError(f"name a RECIPE: {', '.join(BUILT_IN)} (flipper train --list describes them)")
    options.pop("traceback")
    record, exact = _run(_spec(recipe, quiet, options), metrics, quiet=quiet, **options)
    click.echo(json.dumps({key: strict(value) for key, value in record.items()}, allow_nan=False))
    sys.exit(0 if exact else 3)


def _spec(recipe: str, quiet: bool, options: dict[str, Any]) -> TrainSpec:
    """The run that the options ask for; takes them out, and draws the seed where none is given."""
    from flipper.training.spec import Parallel, TrainSpec

    names = ("epochs", "steps", "seed", "device", "resume", "save", "checkpoint_format", "timeout")
    given = {name: options.pop(name) for name in names}
    if given["epochs"] is None and given["steps"] is None:
        given["epochs"] = DEFAULT_EPOCHS
    parallel, every = Parallel.parse(options.pop("parallel")), options.pop("save_every") or 0
    if given["seed"] is None and given["resume"] is None:
        given["seed"] = secrets.randbits(64)
        if not quiet:
            click.echo(f"seed {given['seed']}", err=True)
    return TrainSpec(recipe, parallel, save_every=every, **given)


def _run(
    spec: TrainSpec, metrics: Path | None, *, control: bool, verbose: bool, quiet: bool
) -> tuple[dict[str, object], bool]:
    """The record of the run, or of the control, and whether the control held."""
    from flipper.training.control import control as run_control
    from flipper.training.metrics import MetricsFile
    from flipper.training.run import train

    with ExitStack() as stack:
        listeners: list[Callable[[Event], None]] = []
        if metrics is not None:
            listeners.append(stack.enter_context(MetricsFile(metrics)).write)
        if sys.stderr.isatty() and not quiet:
            listeners.append(stack.enter_context(_progress_bar()))
        elif not quiet:
            listeners.append(_say_saved)

        def hear(event: Event) -> None:
            for listener in listeners:
                listener(event)

        if control:
            verdict = run_control(spec, hear, verbose=verbose)
            return verdict.record(), verdict.first_difference is None
        return train(spec, hear, verbose=verbose).record(), True


def _say_saved(event: Event) -> None:
    if event["event"] == "saved":
        click.echo(f"wrote {event['path']}", err=True)


@contextmanager
def _progress_bar() -> Iterator[Callable[[Event], None]]:
    """A bar on stderr that follows the steps; for a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def follow(event: Event) -> None:
            if event["event"] == "start":
                progress.update(task, total=event["steps"])
            elif event["event"] == "step":
                progress.update(task, completed=event["step"], description=f"loss {event['loss']:.4f}")
            elif event["event"] == "saved":
                progress.console.print(
                    f"wrote {event['path']}", highlight=False, markup=False, soft_wrap=True
                )

        yield follow
