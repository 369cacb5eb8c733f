"""Trade-off: accuracy loss against overhead of each strategy, and both by failure rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, NullLocator

from flipper.failstop.break_even import HOUR
from flipper.failstop.sweep import Point, Sweep
from flipper.report.axes import new_figure, points_axis
from flipper.report.material import Picture
from flipper.report.numbers import percent, significant
from flipper.report.palette import colour

MARKS: Final = {"restart": ("recovered", "o"), "rollback": ("degraded", "s"), "lossy": ("non-finite", "^")}
"""Colour and marker of each strategy."""

STRAIGHT: Final = 0.01
"""Overheads below this are shown on a straight scale, those above on a logarithmic one."""


def draw_trade_off(sweep: Sweep) -> Picture:
    """Overhead from left to right, accuracy loss upwards; a line a strategy, through its failure rates."""
    figure = new_figure(3.4)
    axes = figure.subplots()
    for strategy in sweep.spec.recoveries:
        points = [point for point in sweep.of(strategy) if _ended(point)]
        _line(axes, strategy, points, "overhead_fraction", "accuracy_loss")
        for point in (points[0], points[-1]) if len(points) > 1 else points:
            axes.annotate(
                f"{significant(point.mtbf)} s", (_mean(point, "overhead_fraction"), _mean(point, "accuracy_loss")),
                xytext=(0, 6 if strategy == "restart" else -13), textcoords="offset points", ha="center", fontsize=8,
                color=colour(MARKS[strategy][0]),
            )  # fmt: skip
    _overhead_axis(axes, "x")
    axes.set_xlabel("overhead")
    axes.set_ylabel("accuracy loss (percentage points)")
    points_axis(axes.yaxis)
    axes.grid()
    figure.legend(loc="outside upper left", ncols=3)
    caption = Markup(
        "Each point is the mean over {} at one failure rate, with 95% intervals (Student's t) both ways; lines join "
        "the rates of a strategy, whose shortest and longest MTBF are written beside it. An overhead is never below 0, "
        "whatever its interval says. Better is towards the lower left."
    ).format(_seeds(sweep))
    return Picture("trade-off", "Accuracy loss against overhead", _says(sweep), caption, figure)


def draw_by_rate(sweep: Sweep) -> Picture:
    """The two quantities by MTBF, and where strategies break even."""
    figure = new_figure(3.1)
    left, right = figure.subplots(1, 2, sharex=True)
    for axes, quantity in ((left, "overhead_fraction"), (right, "accuracy_loss")):
        for strategy in sweep.spec.recoveries:
            points = [point for point in sweep.of(strategy) if _ended(point)]
            _line(axes, strategy if axes is left else None, points, None, quantity, strategy)
        axes.set_xscale("log")
        axes.set_xticks(sweep.mtbfs, [f"{significant(mtbf)}" for mtbf in sweep.mtbfs])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("MTBF of the job (s)")
        axes.grid()
        for each in sweep.break_evens():
            if each["quantity"] == quantity and isinstance(at := each["break_even_mtbf_seconds"], float):
                axes.axvline(at, color=colour("muted"), lw=0.9, ls=":")
    _overhead_axis(left, "y")
    left.set_ylabel("overhead")
    right.set_ylabel("accuracy loss (percentage points)")
    points_axis(right.yaxis)
    figure.legend(loc="outside upper left", ncols=3)
    caption = Markup(
        "Means over {}, with 95% intervals (Student's t). Dotted: where the means of two strategies cross, by lines "
        "that are straight where overheads are not on a logarithmic scale."
    ).format(_seeds(sweep))
    return Picture("by-rate", "Overhead and accuracy loss by failure rate", _says(sweep), caption, figure)


def _line(
    axes: Axes, label: str | None, points: Sequence[Point], across: str | None, up: str, strategy: str | None = None
) -> None:
    """across: the quantity from left to right; None for the MTBF."""
    name, marker = MARKS[strategy or label or ""]
    x = [point.mtbf if across is None else _mean(point, across) for point in points]
    reach: dict[str, Any] = {"yerr": [_reach(point, up) for point in points]}
    if across is not None:
        reach["xerr"] = [_reach(point, across) for point in points]
    axes.errorbar(
        x, [_mean(point, up) for point in points], **reach, color=colour(name), marker=marker, markersize=5, lw=1.2,
        elinewidth=0.8, capsize=2, label=label,
    )  # fmt: skip


def _ended(point: Point) -> bool:
    return point.over_seeds("overhead_fraction") is not None and point.over_seeds("accuracy_loss") is not None


def _mean(point: Point, quantity: str) -> float:
    found = point.over_seeds(quantity)
    assert found is not None
    return found.mean


def _reach(point: Point, quantity: str) -> float:
    found = point.over_seeds(quantity)
    return 0.0 if found is None or found.interval is None else found.interval.high - found.mean


def _overhead_axis(axes: Axes, which: str) -> None:
    axis: Axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=STRAIGHT)
    axis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    axis.set_minor_locator(NullLocator())
    (axes.set_xlim if which == "x" else axes.set_ylim)(-STRAIGHT / 10)


def _seeds(sweep: Sweep) -> str:
    return f"seeds ({len(sweep.seeds)} for the accuracy, {len(sweep.points[0].times)} for the overhead)"


def _says(sweep: Sweep) -> str:
    parts = []
    for point in sweep.points:
        said = "no run came to its end"
        if _ended(point):
            said = (
                f"overhead {percent(_mean(point, 'overhead_fraction'))}, accuracy loss "
                f"{significant(100 * _mean(point, 'accuracy_loss'))} points"
            )
        parts.append(f"{point.strategy} at {significant(HOUR / point.mtbf)} failures an hour: {said}")
    return f"{'; '.join(parts)}."
