"""Mesh: the page and the pictures of a study of allreduce on a mesh."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

from flipper import __version__
from flipper.checkpoints.output import atomic_output
from flipper.errors import UsageError
from flipper.mesh.cost import phase_seconds
from flipper.mesh.heat_map import heat_maps
from flipper.mesh.picture import Picture, document, picture
from flipper.mesh.study import Case
from flipper.report.numbers import significant

MOST: Final = 12
"""Pictures of one file."""
SHADES: Final = {
    "paper": "paper", "ink": "ink", "muted": "muted", "grid": "grid", "ring0": "recovered", "ring1": "gradients",
    "hung": "optimizer", "detour": "extreme", "failed": "crash", "column": "band",
    **{f"loss{number}": f"share{number}" for number in range(5)},
}  # fmt: skip
"""Colour of a picture -> that of the palette which stands for it on the page."""


def write_figure(cases: Sequence[Case], path: Path) -> Path:
    """Draw the schedules as SVG, one below the other; replaces what is there. Raises UsageError, OutputError."""
    drawn = [found for _, found in _pictures(cases)]
    if not drawn or len(drawn) > MOST:
        raise UsageError(f"--figure draws 1 to {MOST} schedules, and here are {len(drawn)}; ask for fewer at once")
    with atomic_output(path, force=True) as partial:
        partial.write_text(document(drawn), "utf-8")
    return path


def write_page(cases: Sequence[Case], swept: bool, path: Path) -> Path:
    """Write the study as one HTML file that needs nothing else; replaces what is there.

    swept: whether the cases are places of a hole. Raises UsageError when a library is missing, OutputError.
    """
    if find_spec("jinja2") is None:
        raise UsageError("a report needs jinja2, which is not installed; pip install 'flipper-ckpt[report]'")
    text = _html(cases, swept)
    with atomic_output(path, force=True) as partial:
        partial.write_text(text, "utf-8", errors="backslashreplace")
    return path


def _html(cases: Sequence[Case], swept: bool) -> str:
    from flipper.report.page import environment, own
    from flipper.report.palette import COLOURS

    served = [case for case in cases if case.schedule is not None]
    return environment().get_template("mesh.html.j2").render(
        title="Allreduce round failed chips",
        verdicts=_verdicts(served, swept),
        rows=[case.record() for case in cases],
        trained=[case.record() for case in served if case.question.training is not None],
        phases=[] if swept else [_phases(case) for case in _distinct(served)],
        pictures=[] if swept else [_figure(*each) for each in _pictures(served)][:MOST],
        maps=[_figure(*each) for each in heat_maps(cases)] if swept else [],
        parameters=_parameters(cases[0]),
        command=shlex.join(["flipper", *sys.argv[1:]]),
        version=__version__,
        colours=COLOURS,
        shades=SHADES,
        style=own("page.css"),
    )  # fmt: skip


def _distinct(cases: Sequence[Case]) -> list[Case]:
    """The cases without those whose schedule is another's, for another size of the vector."""
    found: dict[tuple[Any, ...], Case] = {}
    for case in cases:
        if case.schedule is not None:
            found.setdefault((case.question.shape, case.question.holes, case.schedule.algorithm, case.schedule.variant),
                             case)  # fmt: skip
    return list(found.values())


def _pictures(cases: Sequence[Case]) -> list[tuple[str, Picture]]:
    drawn = []
    for case in _distinct(cases):
        assert case.schedule is not None
        failed = " ".join(map(str, case.question.holes))
        title = f"{case.schedule.algorithm} on {case.question.shape}" + (f" without {failed}" if failed else "")
        drawn.append((f"{title}: {case.schedule.variant}", picture(case.schedule, title)))
    return drawn


def _figure(caption: str, drawn: Picture) -> dict[str, Any]:
    return {"caption": caption, "svg": drawn.inline(caption), "width": drawn.width}


def _phases(case: Case) -> dict[str, Any]:
    schedule, asked = case.schedule, case.question
    assert schedule is not None
    failed = " ".join(map(str, asked.holes)) or "nothing"
    return {
        "title": f"{schedule.algorithm} on {asked.shape}, {failed} failed: {schedule.variant}",
        "rows": [
            {
                "phase": phase.name,
                "steps": phase.steps,
                "lanes": len(phase.lanes),
                "long": sum(len(route) > 2 for route in phase.routes.values()),
                "seconds": phase_seconds(phase, schedule, asked.bytes, asked.links),
            }
            for phase in schedule.phases
        ],
    }


def _verdicts(cases: Sequence[Case], swept: bool) -> list[str]:
    """What the page says first, a sentence for each algorithm and model."""
    found: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        asked = case.question
        model = "" if asked.training is None else asked.training.model
        found.setdefault((asked.shape, asked.algorithm, model), []).append(case)
    return [_verdict(group, swept) for group in found.values()]


def _verdict(group: list[Case], swept: bool) -> str:
    asked, kept = group[0].question, [100 * (case.efficiency or 0.0) for case in group]
    slowest = max(group, key=lambda case: case.seconds or 0.0)
    took, before = (significant(1000 * (each or 0.0)) for each in (slowest.seconds, slowest.intact_seconds))
    size = f"{significant(asked.bytes / 1e6)} MB"
    if not swept:
        failed = f" without {' '.join(map(str, asked.holes))}" if asked.holes else ""
        told = (
            f"{asked.algorithm} on {asked.shape}{failed} sums {size} in {took} ms: {kept[0]:.1f} % of the throughput "
            f"of the intact mesh, which takes {before} ms"
        )
    else:
        told = (
            f"{asked.algorithm} on {asked.shape} sums {size} in {took} ms at most, {before} ms without a "
            f"hole; over {len(kept)} holes {min(kept):.1f} to {max(kept):.1f} % of the throughput are left (median "
            f"{median(kept):.1f} %)"
        )
    if asked.training is None:
        return f"{told}."
    step, intact = (asked.training.step(each or 0.0) for each in (slowest.seconds, slowest.intact_seconds))
    longer = 100 * (step / intact - 1)
    how = f"{abs(longer):.2g} % {'longer' if longer > 0 else 'shorter'}"
    return f"{told}; a step of {asked.training.model} is {how}{' at most' if swept else ''}."


def _parameters(case: Case) -> list[tuple[str, str]]:
    asked = case.question
    found = [
        ("link bandwidth", f"{asked.links.bandwidth:g} bytes/s in each direction"),
        ("link latency", f"{asked.links.latency:g} s"),
    ]
    if asked.training is None:
        return [*found, ("vector", f"{asked.bytes:,.0f} bytes")]
    training = asked.training
    computed = f"{training.speed:g} flop/s of a chip, {training.utilization:g} of it reached"
    return [
        *found,
        ("gradients", training.dtype),
        ("computing", f"{training.compute:g} s a step" if training.compute is not None else computed),
        ("overlap", f"{training.overlap:g} of the computing hides communication"),
    ]
