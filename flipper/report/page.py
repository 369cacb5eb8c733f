"""Page: the report of a campaign as one HTML file that needs nothing else."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from functools import partial
from importlib.resources import files
from typing import Any, Final

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flipper import __version__
from flipper.campaigns.outcomes import OUTCOMES
from flipper.report import provenance, recoveries
from flipper.report.answer import answer, progress
from flipper.report.drawing import DRAWERS, inlined
from flipper.report.figures import heat_map, paired, replicas
from flipper.report.material import Material, described, value_text
from flipper.report.numbers import given, number_, p_, percent_, points_
from flipper.report.palette import COLOURS
from flipper.report.trial_table import trial_table
from flipper.statistics.intervals import wilson

PLACES: Final = 40
"""Rows of the table of places with harm."""


def html(material: Material) -> str:
    """The page."""
    return environment().get_template("page.html.j2").render(context(material))


def environment(package: str | None = None) -> Environment:
    """What templates of this package, and of another one, are rendered in: text is escaped, a name that isn't there is
    an error."""
    loaders = [PackageLoader(each, "") for each in (package, "flipper.report") if each is not None]
    found = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters.update(
        number=number_, percent=percent_, points=points_, p=p_, described=described, given=given, value_text=value_text
    )
    return found


def context(material: Material) -> dict[str, Any]:
    """What the template shows."""
    numbers, script = material.numbers, own("trials.js")
    return {
        "material": material,
        "spec": material.spec,
        "numbers": numbers,
        "deaths": material.results.lose_ranks,
        "answer": answer(material),
        "progress": progress(material),
        "figures": inlined(DRAWERS, material),
        "seen": [name for name in OUTCOMES if any(cell["outcomes"][name]["count"] for cell in numbers["cells"])],
        "alarms": {each["parallel"]: each["false_alarms"] for each in numbers["null"]},
        "comparisons": [(paired.label(material, each), each) for each in numbers["comparisons"]],
        "places": _places(material),
        "bits": heat_map.by_bit(material.evidence),
        "replicas": replicas.tally(material),
        "in_points": recoveries.in_points(material),
        "amount": partial(recoveries.amount_, material),
        "setting_text": partial(recoveries.setting_text, material),
        "number": number_,
        "percent": percent_,
        "points": points_,
        "trials": Markup(trial_table(material)),
        "machines": provenance.machines(material.results),
        "spec_text": provenance.spec_text(material.spec),
        "commands": provenance.commands(material.campaign),
        "changed": provenance.last_change(material.campaign),
        "version": __version__,
        "colours": COLOURS,
        "style": Markup(own("page.css")),
        "script": Markup(script),
        "script_hash": "sha256-" + b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def own(name: str) -> str:
    """A file of this package, as text."""
    return files("flipper.report").joinpath(name).read_text("utf-8")


def _places(material: Material) -> list[dict[str, Any]]:
    """Layers and bits with harm, those of the largest share first."""
    found: list[dict[str, Any]] = []
    for (row, bit), struck in heat_map.by_row(material.evidence).items():
        if struck.harmful:
            interval = wilson(struck.harmful, struck.trials, material.spec.confidence)
            found.append(
                {
                    "row": row,
                    "bit": bit,
                    "harmful": struck.harmful,
                    "trials": struck.trials,
                    "share": struck.harmful / struck.trials,
                    "low": interval.low,
                    "high": interval.high,
                }
            )
    return sorted(found, key=lambda place: (-place["share"], -place["harmful"]))[:PLACES]
