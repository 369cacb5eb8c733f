"""`flipper study mesh`: what allreduce costs on a mesh of chips some of which have failed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from flipper.cli.options import FILE, output_options
from flipper.cli.output import emit_rows, say
from flipper.cli.progress import step_bar
from flipper.errors import OutputError, UsageError

if TYPE_CHECKING:
    from flipper.mesh.study import Case, Question

WRONG: Final = 3
EXECUTED: Final = ("executed", "executed_seconds")

SPARE: Final = (("samples_per_chip", "overlap", "bytes"), ("problem", "intact_step_seconds", "compute_seconds"))
"""Columns that a narrow table does without."""


@click.command(short_help="Plan, prove and time allreduce on a mesh with failed chips.")
@click.option("--shape", "shapes", multiple=True, required=True, metavar="RxC", help="Rows x columns; repeatable.")
@click.option("--failed", multiple=True, metavar="HOLE", help="r,c or HxW@r,c, counted from 0; repeatable.")
@click.option("--algorithm", "algorithms", multiple=True, metavar="A", help="ring or ring2d; repeatable.  [both]")
@click.option("--bytes", "size", type=click.FloatRange(1), metavar="N", help="Of the vector.  [default: 1e8]")
@click.option("--link-bandwidth", type=float, default=70e9, metavar="B", help="Bytes/s each way.  [default: 7e10]")
@click.option("--link-latency", type=float, default=1e-6, metavar="S", help="Seconds a link.  [default: 1e-6]")
@click.option("--model", "models", multiple=True, metavar="M", help="resnet50, bert-large; repeatable.")
@click.option("--samples-per-chip", type=click.IntRange(1), metavar="N", help="Of a step.  [default: the model's]")
@click.option("--gradients", default="float32", metavar="DTYPE", help="float32 or bfloat16.  [default: float32]")
@click.option("--chip-speed", type=click.FloatRange(1), default=123e12, metavar="F", help="Flop/s.  [default: 1.23e14]")
@click.option("--utilization", type=float, default=0.4, metavar="U", help="Share of that reached.  [default: 0.4]")
@click.option("--compute-seconds", type=click.FloatRange(0), metavar="S", help="Of a step, instead of all that.")
@click.option("--overlap", type=float, default=0.0, metavar="F", help="Share that hides communication.  [default: 0]")
@click.option("--sweep", is_flag=True, help="A hole at many places, instead of --failed.")
@click.option("--hole", "hole_sizes", multiple=True, metavar="HxW", help="Of the sweep.  [default: 1x1, 2x2, 4x4]")
@click.option("--every", type=click.IntRange(1), metavar="N", help="Rows and columns of the sweep.  [default: 4]")
@click.option("--no-proof", is_flag=True, help="Leave out the symbolic execution.")
@click.option("--routes", is_flag=True, help="Print the bent and longer ways instead, with their links.")
@click.option("--execute", is_flag=True, help="Run each schedule, a rank for each chip, on this machine.")
@click.option("--figure", type=FILE, metavar="FILE.svg", help="Draw the schedules.")
@click.option("--report", type=FILE, metavar="FILE.html", help="Write a page with pictures and tables.")
@output_options
def command(
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
    execute: bool,
    routes: bool,
    figure: Path | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Plan an allreduce that goes round the failed chips, prove it, and say what it costs by a model of the links.

    \b
    Example:
      flipper study mesh --shape 16x32 --failed 2x2@4,6
    """
    from flipper.mesh.study import COLUMNS, TRAINING_COLUMNS, WAY_COLUMNS

    swept = options["sweep"]
    if swept and (routes or figure is not None):
        raise UsageError("--routes and --figure are of the holes that --failed gives: leave --sweep out")
    for path in (figure, report):
        if path is not None and not path.parent.is_dir():
            raise OutputError(f"{path} can't be written: there is no folder {path.parent}")
    columns = (*COLUMNS, *(TRAINING_COLUMNS if options["models"] else ()), *(EXECUTED if execute else ()))
    answered: list[tuple[Case, dict[str, object]]] = []
    rows: Iterable[dict[str, object]] = _rows(list(_questions(**options)), execute, quiet, answered)
    if not swept or sys.stdout.isatty():  # a bar must be gone before the first row is printed
        rows = list(rows)
        if all(case.schedule is None for case, _ in answered):
            raise UsageError(answered[-1][0].problem or "")
    if routes:
        emit_rows((way for case, _ in answered for way in case.ways()), style, WAY_COLUMNS)
    else:
        emit_rows(rows, style, columns, spare=SPARE)
    for path in _written([case for case, _ in answered], figure, report, swept):
        say(f"wrote {path}", quiet)
    if any(row["verified"] is False or row.get("executed") is False for _, row in answered):
        sys.exit(WRONG)


def _rows(
    questions: list[Question], execute: bool, quiet: bool, answered: list[tuple[Case, dict[str, object]]]
) -> Iterator[dict[str, object]]:
    """What is printed, as it is worked out; noted with its case in `answered`."""
    for case in _answered(questions, quiet):
        row = case.record() | (_executed(case) if execute else {})
        answered.append((case, row))
        yield row


def _questions(
    shapes: tuple[str, ...],
    failed: tuple[str, ...],
    algorithms: tuple[str, ...],
    size: float | None,
    link_bandwidth: float,
    link_latency: float,
    models: tuple[str, ...],
    samples_per_chip: int | None,
    gradients: str,
    chip_speed: float,
    utilization: float,
    compute_seconds: float | None,
    overlap: float,
    sweep: bool,
    hole_sizes: tuple[str, ...],
    every: int | None,
    no_proof: bool,
) -> Iterator[Question]:
    from flipper.mesh.chips import Hole
    from flipper.mesh.cost import Links
    from flipper.mesh.plan import ALGORITHMS
    from flipper.mesh.study import Question, positions
    from flipper.mesh.workload import Training

    if sweep and failed:
        raise UsageError("--sweep moves a hole over the mesh, and --failed says where holes are: leave one out")
    if not sweep and (hole_sizes or every):
        raise UsageError("--hole and --every are of --sweep: give that, too, or --failed")
    if models and size is not None:
        raise UsageError("--model says how large the gradients are, and --bytes, too: leave one out")
    if unknown := sorted(set(algorithms) - set(ALGORITHMS)):
        raise UsageError(f"no algorithm {unknown[0]!r}; known: {', '.join(ALGORITHMS)}")
    links = Links(link_bandwidth, link_latency)
    trainings: list[Training | None] = [
        Training(model, samples_per_chip, gradients, chip_speed, utilization, compute_seconds, overlap)
        for model in models
    ]
    given = tuple(Hole.parse(each) for each in failed)
    for shape in shapes:
        places = [(hole,) for hole in positions(shape, hole_sizes, every or 4)] if sweep else [given]
        for holes, algorithm, training in itertools.product(places, algorithms or ALGORITHMS, trainings or [None]):
            yield Question(shape, holes, algorithm, links, size or 1e8, training, not no_proof)


def _answered(questions: list[Question], quiet: bool) -> Iterator[Case]:
    """The cases, under a bar on a terminal's stderr where there are many."""
    from flipper.mesh.study import study

    if quiet or len(questions) < 8 or not sys.stderr.isatty():
        yield from map(study, questions)
        return
    with step_bar() as (progress, task):
        for number, asked in enumerate(questions):
            holes = " ".join(map(str, asked.holes))
            progress.update(task, total=len(questions), completed=number, description=f"{asked.algorithm} {holes}")
            yield study(asked)


def _executed(case: Case) -> dict[str, object]:
    """What a real run says of a case."""
    if case.schedule is None:
        return dict.fromkeys(EXECUTED)
    from flipper.training.mesh_execution import execute

    done = execute(case.schedule)
    return {"executed": done.equal and done.exact, "executed_seconds": done.seconds}


def _written(cases: list[Case], figure: Path | None, report: Path | None, swept: bool) -> Iterator[Path]:
    if figure is not None:
        from flipper.report.mesh import write_figure

        yield write_figure(cases, figure)
    if report is not None:
        from flipper.report.mesh import write_page

        yield write_page(cases, swept, report)
