"""Trial table: all trials as compact JSON, which the page's script sorts, filters and shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from flipper.campaigns.outcomes import GROUPS, OUTCOMES
from flipper.campaigns.results import measured
from flipper.report.evidence import SHOWN
from flipper.report.material import Material, value_text
from flipper.report.provenance import trial_command
from flipper.strict_json import strict

COLUMNS: Final = (
    ("cell", "number"), ("trial", "number"), ("training seed", "text"), ("outcome", "text"), ("final metric", "number"),
    ("golden metric", "number"), ("final loss", "number"), ("steps to recover", "number"), ("first detector", "text"),
    ("detected at step", "number"), ("faults", "number"), ("seconds", "number"),
)  # fmt: skip
"""Columns beside the axes, and how they sort."""

MEASURED: Final = (
    "seed of the faults", "most that the metric fell short", "area between the curves (metric x steps)",
    "distance of the final state (relative)", "took the result of",
)  # fmt: skip
"""What is shown of a trial on demand, beside its faults."""

OF_DEATHS: Final = (
    "deaths", "metric lost", "overhead (s)", "recovery (s)", "steps done again", "ranks left",
)  # fmt: skip
"""The same of one whose ranks die."""

LONGEST: Final = 300
"""Characters of a trial's error that are shown."""


class Numbering:
    """Gives each text the number of its first appearance."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def __call__(self, text: str | None) -> int | None:
        return None if text is None else self.texts.setdefault(text, len(self.texts))


def trial_table(material: Material) -> str:
    """The JSON, safe within a <script>: cells' axes once, texts by number, one list a trial."""
    tensors, texts = Numbering(), Numbering()
    axes = ("parallel", *material.varied)
    document = {
        "axes": ["layout", *material.varied],
        "columns": COLUMNS,
        "measured": MEASURED + (OF_DEATHS if material.results.lose_ranks else ()),
        "detail": "deaths" if material.results.lose_ranks else "struck bits",
        "shown": SHOWN,
        "outcomes": OUTCOMES,
        "groups": GROUPS,
        "command": trial_command(material.campaign),
        "cells": {
            cell.number: [_axis(cell.axes[axis]) if axis in cell.axes else None for axis in axes]
            for cell in material.campaign.cells
        },
        "rows": [_row(material, trial, tensors, texts) for trial in material.results.trials],
        "tensors": list(tensors.texts),
        "texts": list(texts.texts),
    }
    text = json.dumps(strict(document), ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _row(material: Material, trial: Any, tensors: Numbering, texts: Numbering) -> list[Any]:
    """The columns; then what is shown on demand: faults, error, and measurements by the order of MEASURED."""
    run, judgement = trial.run, trial.judgement
    faults = [
        [tensors(tensor), element, bits, _short(before), _short(after)]
        for tensor, element, bits, before, after in material.evidence.faults.get((run.cell, run.trial), ())
    ]
    return [
        run.cell,
        run.trial,
        texts(str(run.training_seed)),
        OUTCOMES.index(judgement.outcome),
        _short(run.metric),
        _short(trial.golden.metric),
        _short(run.loss),
        judgement.steps_to_recover,
        texts(judgement.first_detector),
        judgement.first_detected_step,
        run.struck,
        round(run.seconds, 2),
        faults,
        texts(None if run.error is None else run.error[:LONGEST]),
        [
            None if run.seed is None else str(run.seed),  # above what JavaScript's numbers hold
            _short(judgement.max_excursion),
            _short(judgement.area),
            _short(run.state_distance),
            None if run.reused is None else "cell {} trial {}".format(*run.reused),
            *_of_deaths(material, trial),
        ],
    ]


def _of_deaths(material: Material, trial: Any) -> Iterator[Any]:
    if material.results.lose_ranks:
        found = measured(material.results, trial)
        yield found["kills"] or "none"
        for name in ("accuracy_loss", "overhead_seconds", "recovery_seconds", "steps_again", "world_size_end"):
            yield _short(found[name])


def _axis(value: Any) -> Any:
    return value if isinstance(value, int | float) else value_text(value)


def _short(value: Any) -> Any:
    """Floats by seven digits: the table shows fewer."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
