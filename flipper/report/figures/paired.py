"""Paired differences: of layouts or recoveries, cell by cell, and of reaches, each with its interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from markupsafe import Markup
from matplotlib.axes import Axes

from flipper.report.axes import new_figure, points_axis
from flipper.report.material import Material, Picture, described, shortened
from flipper.report.numbers import MINUS, given, points
from flipper.report.palette import colour

MOST: Final = 120
"""Comparisons that are drawn; the table has all."""

Numbers = Mapping[str, Any]


def draw(material: Material) -> Picture | None:
    """The primary difference above, then the exploratory ones."""
    lines = list(_lines(material))[: MOST + 4]
    if not any(each for _, each in lines):
        return None
    figure = new_figure(0.21 * len(lines) + 0.8)
    axes = figure.subplots()
    margin = material.spec.equivalence
    axes.axvspan(-margin, margin, color=colour("band"), alpha=0.4, lw=0)
    axes.axvline(0, color=colour("muted"), lw=0.8)
    for row, (_, each) in enumerate(lines):
        if each is not None:
            _point(axes, row, each, material.spec.confidence)
    axes.set_yticks(range(len(lines)), [label for label, _ in lines])
    for text, (_, each) in zip(axes.get_yticklabels(), lines, strict=True):
        text.set_fontweight("bold" if each is None else "normal")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    points_axis(axes.xaxis)
    low, high = (pick(each[end] for _, each in lines if each) for pick, end in ((min, "low"), (max, "high")))
    room = 0.04 * (high - low)
    axes.set(xlim=(min(low, -margin) - room, max(high, margin) + room), ylim=(len(lines) - 0.4, -0.7))
    axes.set_xlabel(f"difference of harmful shares, first {MINUS} second, percentage points")
    return Picture("paired", "Paired differences", _says(material), _caption(material, lines), figure)


def _lines(material: Material) -> Iterator[tuple[str, Numbers | None]]:
    """Lines from above: headings, and comparisons under them."""
    main, others = material.numbers["primary"], material.numbers["comparisons"]
    if main["pairs"]:
        yield "Primary: all cells together", None
        yield f"{shortened(main['a'], 18)} {MINUS} {shortened(main['b'], 18)}", main
    parts = {
        "Recoveries": [each for each in others if each["axis"] == "recovery" and "within" not in each],
        "Cell by cell": [each for each in others if "within" in each],
        "Other layouts": [each for each in others if each["axis"] == "parallel" and "within" not in each],
        "Reaches": [each for each in others if each["axis"] == "reach"],
    }
    for heading, members in parts.items():
        if members:
            yield heading, None
        for each in members:
            yield shortened(label(material, each), 44), each


def label(material: Material, each: Numbers) -> str:
    """What a comparison compares, in short."""
    if "within" in each and material.varied:
        return described(each["within"], material.varied)
    return f"{each['a']} {MINUS} {each['b']}"


def _point(axes: Axes, row: int, each: Numbers, confidence: float) -> None:
    main = "p_holm" not in each
    told = (each["p"] if main else each["p_holm"]) <= 1 - confidence
    axes.errorbar(
        each["difference"], row,
        xerr=[[each["difference"] - each["low"]], [each["high"] - each["difference"]]],
        fmt="D" if main else "o", markersize=5.5 if main else 4, elinewidth=1.8 if main else 1.1,
        color=colour("extreme" if told else "ink"), markerfacecolor=colour("extreme" if told else "ink"), zorder=3,
    )  # fmt: skip
    text = f"{points(each['difference'])} ({points(each['low'])} to {points(each['high'])})"
    axes.text(1.015, row, text, va="center", fontsize=8, transform=axes.get_yaxis_transform())


def _says(material: Material) -> str:
    main, others = material.numbers["primary"], material.numbers["comparisons"]
    told = sum(each["p_holm"] <= 1 - material.spec.confidence for each in others)
    first = "No pair answers the primary question. "
    if main["pairs"]:
        first = (
            f"{main['a']} minus {main['b']}: {points(main['difference'])} percentage points, interval "
            f"{points(main['low'])} to {points(main['high'])}. "
        )
    return (
        f"Points with intervals on a line. {first}{told} of {len(others)} exploratory comparisons show a difference "
        "after Holm's correction. The table below has all numbers."
    )


def _caption(material: Material, lines: list[tuple[str, Numbers | None]]) -> Markup:
    spec, all_lines = material.spec, len(material.numbers["comparisons"])
    drawn = sum(each is not None and "p_holm" in each for _, each in lines)
    parts = [
        Markup("Trials with the same draw are compared pair by pair; a point right of zero means more harm under the "
               "first. Intervals at {}, each by itself. Shaded: the equivalence margin of {} points. "
               "Orange: p (after Holm's correction, but for the primary one) at most {}.").format(
            material.confidence, material.margin, given(1 - spec.confidence)
        )
    ]  # fmt: skip
    if drawn < all_lines:
        parts.append(Markup("The first {} of {} comparisons are drawn.").format(drawn, all_lines))
    return Markup(" ").join(parts)
