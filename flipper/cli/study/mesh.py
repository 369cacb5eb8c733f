"""`flipper study mesh`: what allreduce costs on a mesh of chips some of which have failed."""

from __future__ import annotations

import sys
from typing import Final

import click

from flipper.cli.options import output_options
from flipper.cli.output import emit_rows

UNPROVED: Final = 3

COLUMNS: Final = (
    "shape", "failed", "survivors", "algorithm", "variant", "bytes", "steps", "max_link_load", "conflicts", "seconds",
    "intact_seconds", "efficiency", "verified",
)  # fmt: skip


@click.command(short_help="Plan, prove and time allreduce on a mesh with failed chips.")
@click.option("--shape", "shapes", multiple=True, required=True, metavar="RxC", help="Rows x columns; repeatable.")
@click.option("--failed", "failed", multiple=True, metavar="HOLE", help="r,c or HxW@r,c, counted from 0; repeatable.")
@click.option("--algorithm", "algorithms", multiple=True, metavar="A", help="ring or ring2d.  [default: both]")
@click.option("--bytes", "size", type=click.FloatRange(1), default=1e8, metavar="N", help="Of the vector.  [1e8]")
@click.option("--link-bandwidth", type=float, default=70e9, metavar="B", help="Bytes/s each way.  [default: 7e10]")
@click.option("--link-latency", type=float, default=1e-6, metavar="S", help="Seconds a link.  [default: 1e-6]")
@output_options
def command(
    shapes: tuple[str, ...],
    failed: tuple[str, ...],
    algorithms: tuple[str, ...],
    size: float,
    link_bandwidth: float,
    link_latency: float,
    style: str | None,
    quiet: bool,
    verbose: bool,
    traceback: bool,
) -> None:
    """Plan an allreduce that goes round the failed chips, prove it, and say what it costs by a model of the links.

    \b
    Example:
      flipper study mesh --shape 16x32 --failed 2x2@4,6
    """
    from flipper.mesh.chips import Hole
    from flipper.mesh.cost import Links
    from flipper.mesh.plan import ALGORITHMS
    from flipper.mesh.study import study

    holes = [Hole.parse(each) for each in failed]
    links = Links(link_bandwidth, link_latency)
    cases = [study(shape, holes, algorithm, size, links) for shape in shapes for algorithm in algorithms or ALGORITHMS]
    emit_rows((case.record() for case in cases), style, COLUMNS)
    if any(case.proof is not None and not case.proof.holds for case in cases):
        sys.exit(UNPROVED)
