"""`flipper study checkpoint`: what saving and loading costs, and whether a restart is exact."""

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

if TYPE_CHECKING:
    from flipper.study.spec import StudySpec
    from flipper.training.spec import Event

REPEATING: Final = ("repeats",)
LEAST: Final = (
    "save_seconds_low", "save_seconds_high", "load_seconds_low", "load_seconds_high", "cold_load_seconds_low",
    "cold_load_seconds_high", "stall_seconds_low", "stall_seconds_high", "peak_bytes_low", "peak_bytes_high",
    "epoch_share", "interval_seconds", "layout",
)  # fmt: skip
"""Columns that a narrow terminal does without."""


@click.command(short_help="Measure what a checkpoint costs, by format, content, ranks and mode.")
@click.argument("recipe", required=False)
@click.option("--from", "source", type=CHECKPOINT, metavar="CKPT", help="Instead: the tensors of a checkpoint.")
@click.option("--synthetic", metavar="SIZE", help="Instead: made-up parameters of so many bytes, as 100MB, 1GiB.")
@click.option("--formats", metavar="F[,F...]", help="Or all; --list describes them.  [default: six common ones]")
@click.option("--content", default="all", metavar="C[,C...]", help="parameters, model, optimizer or all.")
@click.option("--ranks", default="1", metavar="N[,N...]", help="Numbers of ranks.  [default: 1]")
@click.option("--parallel", "kind", default="fsdp", metavar="KIND", help="How several share.  [default: fsdp]")
@click.option("--mode", default="sync", metavar="M[,M...]", help="sync, or async (dcp alone).  [default: sync]")
@click.option("--fsync", default="no", metavar="no[,yes]", help="Whether saving waits for the disk.  [default: no]")
@click.option("--repeat", type=click.IntRange(1), default=5, metavar="N", help="Of each save and load.  [default: 5]")
@click.option("--mtbf", metavar="DURATION", help="Of the job, for the interval between checkpoints: 30min, 6h.")
@click.option("--folder", type=FILE, metavar="DIR", help="On the disk to measure.  [default: the temporary folder]")
@click.option("--data-dir", type=FILE, metavar="DIR", help="Where data lies that no package brings.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where ranks compute.")
@click.option("--timeout", type=click.FloatRange(0.1, 1e6), default=300.0, metavar="SECONDS", help="For a silent rank.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Of training; drawn without it.")
@click.option("--report", type=FILE, metavar="FILE.html", help="Also write a page with figures.")
@click.option("--list", "list_formats", is_flag=True, help="List the formats.")
@output_options
def command(
    list_formats: bool,
    report: Path | None,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
    **options: Any,
) -> None:
    """Save and load the state of RECIPE in training, time it, and restart from every kind of checkpoint.

    A row has medians, and the least and the most of the repeats. Its `missing` says what a run from such a checkpoint
    lacked to be the uninterrupted one to the bit.

    \b
    Example:
      flipper study checkpoint digits-mlp --formats pytorch,safetensors --repeat 3 --seed 1
    """
    from flipper.study.formats import FORMATS
    from flipper.study.rows import COLUMNS

    if list_formats:
        emit_rows(({"name": name, "summary": entry.summary} for name, entry in FORMATS.items()), style,
                  ("name", "summary"))  # fmt: skip
        return
    from flipper.study.checkpoint import study
    from flipper.study.writing import check_drawable, write_page

    if report is not None:
        check_drawable(report)
    spec = _spec(quiet, **options)
    with _following(spec, quiet) as follow:
        found = study(spec, follow, verbose=verbose)
    emit_rows(iter(found.rows), style, COLUMNS, spare=(REPEATING, LEAST))
    if report is not None:
        write_page(found, report)
        say(f"wrote {report}", quiet)


def _spec(
    quiet: bool,
    synthetic: str | None,
    formats: str | None,
    content: str,
    ranks: str,
    mode: str,
    fsync: str,
    mtbf: str | None,
    seed: int | None,
    **given: Any,
) -> StudySpec:
    """The study that the options ask for; draws the seed where none is given."""
    from flipper.errors import UsageError
    from flipper.failstop.failures import seconds_of
    from flipper.study.formats import FORMATS
    from flipper.study.spec import StudySpec, bytes_of

    drawn = seed is None
    if formats is not None:
        given["formats"] = tuple(FORMATS) if formats == "all" else _names(formats)
    if not all(each.isascii() and each.isdigit() for each in _names(ranks)):
        raise UsageError(f"--ranks {ranks!r}: say numbers, as 1,2,4")
    spec = StudySpec(
        synthetic=None if synthetic is None else bytes_of(synthetic, "--synthetic"),
        contents=_names(content),
        ranks=tuple(map(int, _names(ranks))),
        modes=_names(mode),
        fsyncs=_names(fsync),
        mtbf=None if mtbf is None else seconds_of(mtbf, "--mtbf"),
        seed=secrets.randbits(64) if seed is None else seed,
        **given,
    )
    if alone := spec.never_async():
        say(f"note: {', '.join(alone)}: no rows with --mode async, which {_asynchronous()} alone has", quiet)
    if drawn and spec.recipe is not None:
        say(f"seed {spec.seed}", quiet)
    return spec


def _asynchronous() -> str:
    from flipper.study.formats import FORMATS

    return ", ".join(name for name, entry in FORMATS.items() if entry.asynchronous)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


@contextmanager
def _following(spec: StudySpec, quiet: bool) -> Iterator[Callable[[Event], None]]:
    """A bar on stderr, for a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda event: None
        return
    total = sum(len(list(spec.combinations(ranks))) for ranks in spec.ranks) * (spec.repeat + 1)
    with step_bar() as (progress, task):
        progress.update(task, total=total)

        def follow(event: Event) -> None:
            if event["event"] == "measured":
                progress.update(task, advance=1, description=f"repeat {event['repeat']} of {spec.repeat}")
            elif event["event"] == "restarted":
                progress.update(task, description=f"restarting from {event['combination'].format}")

        yield follow
