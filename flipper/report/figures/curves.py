"""Curves: the metric of struck runs over the band of their golden runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from flipper.campaigns.record import RunRecord
from flipper.campaigns.results import Trial
from flipper.report.axes import panels, powers_axis
from flipper.report.material import Material, Picture, shortened
from flipper.report.palette import GROUPS, colour

MOST: Final = 80
"""Runs of one group that a panel shows."""

BEFORE: Final = 0.5
"""Of the steps after the faults, as many before them are shown as this part of those: more would crowd them out."""

STYLES: Final = {"benign": (0.6, "solid"), "sdc": (0.9, "solid"), "due": (0.9, (0, (3, 1.5)))}
"""Line width and dashes by group of outcomes: colour is not all that tells them apart."""

NAMES: Final = {"benign": "benign", "sdc": "silently harmed", "due": "visibly harmed"}


def draw(material: Material) -> Picture | None:
    """A panel a layout."""
    shown = {layout: _chosen(material, layout) for layout in material.layouts}
    shown = {layout: trials for layout, trials in shown.items() if trials}
    if not shown:
        return None
    figure, grid = panels(len(shown), 2.0)
    for axes, (layout, trials) in zip(grid, shown.items(), strict=True):
        struck = min(trial.run.first_step for trial in trials)
        last = max(step for trial in trials for step, _, _ in trial.run.evals)
        _golden(axes, material, layout, struck - BEFORE * (last - struck))
        _runs(axes, trials)
        axes.axvline(struck, color=colour("muted"), lw=0.8, ls=":")
        axes.set_title(shortened(layout, 30))
        axes.autoscale_view()
    if material.spec.better == "lower" and _spread(shown.values()) > 100:
        grid[0].set_yscale("log")
        powers_axis(grid[0].yaxis)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel(shortened(material.spec.metric, 30), fontsize=9)
    groups = [group for group in GROUPS if any(t.judgement.group == group for each in shown.values() for t in each)]
    handles = [Line2D([], [], color=colour(GROUPS[g]), lw=1.5, ls=STYLES[g][1]) for g in groups]
    handles += [Line2D([], [], color=colour("ink"), lw=1.4), Patch(facecolor=colour("band"))]  # type: ignore[list-item]
    labels = [*(NAMES[group] for group in groups), "golden run", "its band"]
    figure.legend(handles, labels, loc="outside upper center", ncols=5, handlelength=1.8, columnspacing=1.4)
    return Picture(
        "curves", f"{material.spec.metric} after the faults", _says(material), _caption(material, shown), figure
    )


def _chosen(material: Material, layout: str) -> list[Trial]:
    """The runs of a panel: of each group, at most MOST of those that were evaluated, evenly from all cells."""
    found: list[Trial] = []
    for group in GROUPS:
        mine = [
            trial
            for trial in material.results.trials
            if trial.cell.parallel == layout and trial.judgement.group == group and trial.run.evals
        ]
        found += evenly(mine, MOST)
    return found


def evenly(trials: Sequence[Trial], most: int) -> list[Trial]:
    """At most so many, at even distances."""
    count = min(len(trials), most)
    return [trials[number * len(trials) // count] for number in range(count)]


def _golden(axes: Axes, material: Material, layout: str, first: float) -> None:
    """The golden runs from a step on, and their bands."""
    width, higher = material.results.band(layout).width, material.spec.better == "higher"
    distinct = {str(golden.evals): golden for golden in material.results.goldens.values() if golden.parallel == layout}
    for golden in distinct.values():
        start = _struck_at(material, golden)
        points = list(zip(*_series(golden), strict=True))
        after = [point for point in points if point[0] >= start]
        if after:
            at, best = zip(*after, strict=True)
            worst = [value - width if higher else value + width for value in best]
            axes.fill_between(at, worst, best, color=colour("band"), alpha=0.55, lw=0, zorder=1)
        seen = [point for point in points if point[0] >= first]
        axes.plot(*zip(*seen, strict=True), color=colour("ink"), lw=1.3, zorder=4)


def _struck_at(material: Material, golden: RunRecord) -> int:
    return min((trial.run.first_step for trial in material.results.trials if trial.golden is golden), default=0)


def _runs(axes: Axes, trials: Iterable[Trial]) -> None:
    for group, (width, dashes) in STYLES.items():
        lines = [list(zip(*_series(trial.run), strict=True)) for trial in trials if trial.judgement.group == group]
        axes.add_collection(
            LineCollection(lines, colors=colour(GROUPS[group]), linewidths=width, linestyles=[dashes], alpha=0.8)
        )


def _series(run: RunRecord) -> tuple[list[int], list[float]]:
    """Steps and values of the metric; what is no finite number leaves a gap."""
    return [step for step, _, _ in run.evals], [v if math.isfinite(v) else math.nan for _, _, v in run.evals]


def _spread(shown: Iterable[list[Trial]]) -> float:
    values = [v for trials in shown for trial in trials for v in _series(trial.run)[1] if not math.isnan(v)]
    return max(values) / min(values) if values and min(values) > 0 else 0.0


def _says(material: Material) -> str:
    trials = material.results.trials
    worse = sum(trial.harmful for trial in trials)
    return (
        f"Curves of {material.spec.metric} by step, a panel a layout: golden runs, their band, and struck runs. "
        f"{len(trials) - worse} of {len(trials)} struck runs are benign; {worse} end harmed, most of them outside the "
        "band. The table of trials has the last value of each."
    )


def _caption(material: Material, shown: dict[str, list[Trial]]) -> Markup:
    drawn = sum(map(len, shown.values()))
    return Markup(
        "Drawn: {} of {} struck runs (at most {} of a group in a panel, evenly chosen), a golden run for each training "
        "seed, not from its first step where that is far off, and beside it the band that null trials or the spec set. "
        "Dotted: where the faults were made. "
        "Evaluations that are no finite number leave gaps. Silently harmed: degraded or extreme; visibly: non-finite, "
        "hang, crash or refused."
    ).format(f"{drawn:,}", f"{len(material.results.trials):,}", MOST)
