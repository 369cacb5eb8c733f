"""Detectors: the share of harmful trials that each one saw, and of benign ones that it took for harmful."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup
from matplotlib.lines import Line2D

from flipper.report.axes import new_figure, percent_axis
from flipper.report.material import Material, Picture
from flipper.report.palette import colour

KINDS = {"harmful": ("extreme", "o", -0.16), "benign": ("recovered", "s", 0.16)}


def draw(material: Material) -> Picture | None:
    """Two points with intervals for each detector that saw anything."""
    entries = material.numbers["detectors"]
    if not entries:
        return None
    figure = new_figure(0.36 * len(entries) + 0.95)
    axes = figure.subplots()
    for row, entry in enumerate(entries):
        for kind, (name, marker, shift) in KINDS.items():
            seen = entry[kind]
            if seen["proportion"] is None:
                continue
            axes.errorbar(
                seen["proportion"], row + shift,
                xerr=[[max(0.0, seen["proportion"] - seen["low"])], [max(0.0, seen["high"] - seen["proportion"])]],
                fmt=marker, markersize=4.5, elinewidth=1.3, color=colour(name), clip_on=False,
            )  # fmt: skip
            text = f"{seen['count']}/{seen['of']}"
            axes.text(1.02, row + shift, text, va="center", fontsize=8, transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(entries)), [entry["detector"] for entry in entries])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, 1), ylim=(len(entries) - 0.5, -0.5), xlabel="share of trials in which it raised an alarm")
    axes.grid(axis="x")
    percent_axis(axes.xaxis)
    handles = [Line2D([], [], color=colour(name), marker=marker, lw=1.3) for name, marker, _ in KINDS.values()]
    labels = ["of the harmful trials", "of the benign trials"]
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return Picture("detectors", "What the detectors saw", _says(entries), _caption(material), figure)


def _says(entries: list[dict[str, Any]]) -> str:
    parts = [
        f"{entry['detector']}: {entry['harmful']['count']} of {entry['harmful']['of']} harmful and "
        f"{entry['benign']['count']} of {entry['benign']['of']} benign trials"
        for entry in entries
    ]
    return f"Points with intervals, two for each detector. {'; '.join(parts)}."


def _caption(material: Material) -> Markup:
    return Markup(
        "Alarms that the golden run gives at the same step don't count. Wilson intervals at {}. An alarm in a benign "
        "trial is no false one: the fault was there, and training bore it. Detectors without an alarm are left out."
    ).format(material.confidence)
