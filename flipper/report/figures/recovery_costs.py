"""Trade-off: where ranks die, what each recovery loses in accuracy against what it costs in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from flipper.campaigns.results import measured
from flipper.report.axes import panels, percent_axis, points_axis
from flipper.report.material import Material, Picture, shortened
from flipper.report.numbers import percent
from flipper.report.palette import colour
from flipper.report.recoveries import amount, in_points, of_setting, setting_text

LOOKS: Final = (
    ("recovered", "o"), ("degraded", "s"), ("non-finite", "D"), ("gradients", "^"), ("hang", "v"), ("crash", "P"),
)  # fmt: skip
"""Colour and marker of each recovery in turn: colour is not all that tells them apart."""

Numbers = Mapping[str, Any]


def draw(material: Material) -> Picture | None:
    """A panel a setting: trials as small marks, means with intervals on both axes as large ones."""
    known = [each for each in material.numbers.get("strategies", ()) if each["overhead_fraction"]["count"]]
    if not known:
        return None
    names = list(dict.fromkeys(setting_text(material, each) for each in known))
    looks = dict(zip(dict.fromkeys(each["recovery"] for each in known), cycle(LOOKS)))
    figure, grid = panels(len(names), 2.7)
    for axes, name in zip(grid, names, strict=True):
        here = [each for each in known if setting_text(material, each) == name]
        axes.axhline(0, color=colour("muted"), lw=0.8, zorder=1)
        axes.axvline(0, color=colour("muted"), lw=0.8, zorder=1)
        for each in here:
            _trials(axes, material, each, looks[each["recovery"]])
        for each in here:
            _mean(axes, each, looks[each["recovery"]])
        axes.set_title(shortened(name, 30))
        axes.grid(alpha=0.7)
    percent_axis(grid[0].xaxis)
    if in_points(material):
        points_axis(grid[0].yaxis)
    unit = ", percentage points" if in_points(material) else ""
    figure.supxlabel("overhead: time of the whole run over a clean one's", fontsize=9)
    figure.supylabel(f"{shortened(material.spec.metric, 30)} lost{unit}", fontsize=9)
    handles = [
        Line2D([], [], color=colour(name), marker=marker, markersize=6, lw=1.5) for name, marker in looks.values()
    ]
    figure.legend(handles, [shortened(each, 24) for each in looks], loc="outside upper center", ncols=6)
    return Picture(
        "trade-off", f"{material.spec.metric} lost against overhead", _says(material, known),
        _caption(material, known), figure,
    )  # fmt: skip


def _trials(axes: Axes, material: Material, each: Numbers, look: tuple[str, str]) -> None:
    points = []
    for trial in of_setting(material, each):
        row = measured(material.results, trial)
        if row["overhead_fraction"] is not None and row["accuracy_loss"] is not None:
            points.append((row["overhead_fraction"], row["accuracy_loss"]))
    if points:
        across, up = zip(*points, strict=True)
        axes.plot(across, up, look[1], color=colour(look[0]), markersize=2.5, alpha=0.3, mew=0, zorder=2)


def _mean(axes: Axes, each: Numbers, look: tuple[str, str]) -> None:
    across, up = each["overhead_fraction"], each["accuracy_loss"]
    axes.errorbar(
        across["mean"], up["mean"], xerr=_reach(across), yerr=_reach(up), fmt=look[1], markersize=6.5, elinewidth=1.6,
        color=colour(look[0]), markeredgecolor=colour("paper"), markeredgewidth=0.6, zorder=4,
    )  # fmt: skip


def _reach(each: Numbers) -> list[list[float]] | None:
    return None if each["low"] is None else [[each["mean"] - each["low"]], [each["high"] - each["mean"]]]


def _says(material: Material, known: Sequence[Numbers]) -> str:
    told = "; ".join(
        f"{each['recovery']} under {setting_text(material, each)}: "
        f"{amount(material, each['accuracy_loss']['mean'])} lost, {percent(each['overhead_fraction']['mean'])} overhead"
        for each in known
    )
    return f"Points with intervals on both axes, a panel a setting. {told}. The table below has all numbers."


def _caption(material: Material, known: Sequence[Numbers]) -> Markup:
    return Markup(
        "Large: the mean over all trials of a recovery that came to an end, with its {} interval on either axis. "
        "Small: single trials ({}). Lower is more accurate, further left is faster. Times are those of this machine, "
        "with whatever else it did; where ranks share processors, fewer of them may be faster than all."
    ).format(material.confidence, f"{sum(each['overhead_fraction']['count'] for each in known):,}")
