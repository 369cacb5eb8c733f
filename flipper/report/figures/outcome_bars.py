"""Outcome bars: of each cell what its trials came to, and the harmful share with its interval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from flipper.campaigns.outcomes import GROUPS, OUTCOMES
from flipper.report.axes import new_figure, percent_axis
from flipper.report.material import Material, Picture, described, shortened
from flipper.report.numbers import percent
from flipper.report.palette import colour

MOST: Final = 150
"""Cells of which there are bars; the table has all."""

ROW: Final = 0.19
"""Inches for a line."""

WORST_FIRST: Final = tuple(reversed(OUTCOMES))


def draw(material: Material) -> Picture | None:
    """Bars by cell; cells that differ only in their layout stand together."""
    cells = [cell for cell in material.numbers["cells"] if cell["trials"]]
    if not cells:
        return None
    seen = [name for name in WORST_FIRST if any(cell["outcomes"][name]["count"] for cell in cells)]
    lines = list(_lines(material, cells[:MOST]))
    figure = new_figure(ROW * len(lines) + 1.0)
    axes = figure.subplots()
    for row, (label, cell) in enumerate(lines):
        if cell is None:
            axes.text(0, row + 0.1, label, va="center", fontweight="bold", fontsize=8.5)
        else:
            _bar(axes, row, cell, seen)
    percent_axis(axes.xaxis)
    axes.set(xlim=(0, 1), ylim=(len(lines) - 0.4, -0.6), xlabel="share of the cell's trials")
    rows = [row for row, (_, cell) in enumerate(lines) if cell is not None]
    axes.set_yticks(rows, [lines[row][0] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _legend(figure, seen, material.confidence)
    return Picture("outcomes", "What the trials of each cell came to", _says(cells), _caption(material, cells), figure)


def _lines(material: Material, cells: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Lines from above: headings without a cell, and the cells under them."""
    if len(material.layouts) == 1 or not material.varied:
        for cell in cells:
            yield shortened(described(cell, material.varied) or cell["parallel"]), cell
        return
    together: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        together.setdefault(described(cell, material.varied), []).append(cell)
    for label, members in together.items():
        yield shortened(label, 90), None
        for cell in members:
            yield shortened(cell["parallel"], 24), cell


def _bar(axes: Axes, row: int, cell: dict[str, Any], seen: list[str]) -> None:
    left = 0.0
    for name in seen:
        share = cell["outcomes"][name]["proportion"]
        if share:
            axes.barh(row, share, 0.74, left, color=colour(name), edgecolor=colour("paper"), linewidth=0.5)
            left += share
    harmful = cell["not_benign"]
    for name, wide, size in (("paper", 3.4, 5.5), ("ink", 1.3, 3.2)):  # a pale rim, so that it shows on any bar
        axes.errorbar(
            harmful["proportion"], row,
            xerr=[[harmful["proportion"] - harmful["low"]], [harmful["high"] - harmful["proportion"]]],
            fmt="o", markersize=size, color=colour(name), elinewidth=wide, capsize=0, clip_on=False, zorder=3,
        )  # fmt: skip
    tally = f"{harmful['count']}/{cell['trials']}"
    axes.text(1.02, row, tally, va="center", fontsize=8, transform=axes.get_yaxis_transform())


def _legend(figure: Figure, seen: list[str], confidence: str) -> None:
    interval = Line2D([], [], color=colour("ink"), marker="o", markersize=3.2, linewidth=1.3)
    handles = [*(Patch(facecolor=colour(name)) for name in seen), interval]
    labels = [*seen, f"harmful share, {confidence} interval"]
    figure.legend(handles, labels, loc="outside upper center", ncols=5, handlelength=1.3, columnspacing=1.2)


def _says(cells: list[dict[str, Any]]) -> str:
    worst = max(cells, key=lambda cell: (cell["not_benign"]["proportion"], cell["not_benign"]["low"]))
    harmless = sum(not cell["not_benign"]["count"] for cell in cells)
    return (
        f"Stacked bars, one for each of {len(cells)} cells. The harmful share is highest in cell {worst['cell']}, "
        f"{worst['parallel']} with {described(worst, [a for a in worst if a in ('bits', 'count', 'role', 'reach')])}: "
        f"{percent(worst['not_benign']['proportion'])}. {harmless} cells have no harmful trial. "
        "The table below has all numbers."
    )


def _caption(material: Material, cells: list[dict[str, Any]]) -> Markup:
    parts = []
    if material.common:
        parts.append(Markup("All cells: {}.").format(material.common))
    groups = {group: [name for name in WORST_FIRST if GROUPS[name] == group] for group in ("due", "sdc", "benign")}
    parts.append(
        Markup("From the left: harmful outcomes ({}; {}), then benign ones ({}). The point is the harmful share with "
               "its Wilson interval at {}; right of the bar, harmful trials over all of the cell.").format(
            ", ".join(groups["due"]), ", ".join(groups["sdc"]), ", ".join(groups["benign"]), material.confidence
        )
    )  # fmt: skip
    if len(cells) > MOST:
        parts.append(Markup("Bars are drawn for the first {} of {} cells.").format(MOST, len(cells)))
    return Markup(" ").join(parts)
