"""The page of a study of checkpoints: one HTML file that needs nothing else, in the manner of a campaign's report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import Any, Final

from markupsafe import Markup

from flipper import __version__
from flipper.report.drawing import inlined
from flipper.report.material import Picture
from flipper.report.numbers import exact
from flipper.report.page import environment, own
from flipper.report.palette import COLOURS
from flipper.study import figures
from flipper.study.checkpoint import Study
from flipper.study.formats import FORMATS

DRAWERS: Final[dict[str, Callable[[Study], Picture | None]]] = {
    "times": figures.times,
    "sizes": figures.sizes,
    "waste": figures.waste,
}


def html(study: Study) -> str:
    """The page."""
    found = environment("flipper.study")
    found.filters.update(
        duration=lambda value: exact(figures.duration(value), value),
        amount=lambda value: exact(figures.amount(value), value),
    )
    return found.get_template("checkpoint.html.j2").render(_context(study))


def _context(study: Study) -> dict[str, Any]:
    """What the template shows."""
    return {
        "study": study,
        "subject": subject(study),
        "verdict": verdict(study),
        "grounds": list(grounds(study)),
        "figures": inlined(DRAWERS, study),
        "formats": {name: FORMATS[name].summary for name in study.spec.formats},
        "command": shlex.join(["flipper", *sys.argv[1:]]),
        "version": __version__,
        "colours": COLOURS,
        "style": Markup(own("page.css")),
    }


def subject(study: Study) -> str:
    """What was saved."""
    spec = study.spec
    if spec.recipe is not None:
        return spec.recipe
    return f"the tensors of {spec.source}" if spec.source is not None else f"{figures.amount(spec.synthetic)} made up"


def verdict(study: Study) -> str:
    """The page's answer, in a sentence or two."""
    rows = study.rows
    least = min(figures.exact(rows), key=lambda row: float(row["stall_seconds"]))
    held = f"{figures.called(least)} holds up training least: {figures.duration(least['stall_seconds'])} a checkpoint."
    known = [row["deterministic"] for row in rows if row["deterministic"] is not None]
    if not known:
        return held
    if all(known):
        return f"From every kind of checkpoint a run goes on to the bit; {held}"
    if any(known):
        return f"Of the checkpoints from which a run goes on to the bit, {held}"
    return f"From none of these checkpoints a run goes on to the bit; {held}"


def grounds(study: Study) -> list[str]:
    """What else is worth a sentence each."""
    rows, said = study.rows, []
    lacking = {row["content"]: row["missing"] for row in rows if row["missing"]}
    for content, missing in lacking.items():
        said.append(f"From content {content} a run does not go on to the bit, for want of: {', '.join(missing)}.")
    small, large = (pick(figures.exact(rows), key=lambda row: row["bytes"]) for pick in (min, max))
    said.append(
        f"The smallest{' of them' if lacking else ''} is {figures.called(small)} with "
        f"{figures.amount(small['bytes'])}, the largest {figures.called(large)} with {figures.amount(large['bytes'])}."
    )
    if any(row["cold_load_seconds"] is None for row in rows):
        said.append(
            f"Loading from the disk was not measured: the file system ({study.filesystem or 'unknown'}) keeps files in "
            "memory."
        )
    return said
