"""Axes: sizes, ticks and intervals that all figures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from flipper.report.numbers import MINUS, significant, ten_to

WIDTH: Final = 6.9
"""Inches: the text of a paper with one column."""


def new_figure(height: float) -> Figure:
    """A figure as wide as a page's text. height: inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def percent_axis(axis: Axis) -> None:
    """Ticks of shares."""
    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%".replace("-", MINUS)))


def points_axis(axis: Axis) -> None:
    """Ticks of differences of shares, in percentage points."""
    axis.set_major_locator(MaxNLocator(7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _signed(100 * value)))


def _signed(value: float) -> str:
    return f"{round(value, 6):+g}".replace("-", MINUS) if round(value, 6) else "0"


def powers_axis(axis: Axis) -> None:
    """Ticks of a logarithmic axis, in plain text."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))


def _power(value: float) -> str:
    from math import isclose, log10

    if value == 0:
        return "0"
    power = round(log10(abs(value)))
    whole = isclose(abs(value), 10.0**power, rel_tol=1e-6)
    return ten_to(power) if whole and value > 0 else significant(value, 1)


def panels(count: int, height: float, across: int = 3) -> tuple[Figure, Sequence[Axes]]:
    """A figure with this many panels of `height` inches, at most `across` beside each other, on the same axes."""
    columns = min(count, across) if count != across + 1 else -(-count // 2)
    rows = -(-count // columns)
    figure = new_figure(height * rows + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for spare in grid[count:]:
        spare.set_visible(False)
    for last in grid[max(0, count - columns) : count]:
        last.tick_params(labelbottom=True)  # also where the row below is not full
    return figure, list(grid[:count])
