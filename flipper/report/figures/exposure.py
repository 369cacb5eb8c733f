"""Exposure: the bits that each layout keeps in memory, and the rate of harm that upsets in them make."""

from __future__ import annotations

import math
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from flipper.report.axes import new_figure
from flipper.report.material import Material, Picture, shortened
from flipper.report.numbers import significant, ten_to
from flipper.report.palette import colour

KINDS = ("parameters", "gradients", "buffers", "optimizer")


def draw(material: Material) -> Picture | None:
    """Bits at the left, rates at the right."""
    entries = material.numbers["exposure"]
    if not entries:
        return None
    figure = new_figure(0.26 * len(entries) + 1.15)
    left, right = figure.subplots(1, 2, sharey=True)
    _bits(left, entries)
    _rates(right, entries)
    left.set_yticks(range(len(entries)), [shortened(each["parallel"], 24) for each in entries])
    left.set_ylim(len(entries) - 0.5, -0.5)
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
    figure.legend(loc="outside upper left", ncols=4, handlelength=1.3, columnspacing=1.2)
    return Picture("exposure", "Exposure, layout by layout", _says(entries), _caption(material, entries), figure)


def _bits(axes: Axes, entries: list[dict[str, Any]]) -> None:
    starts = [0.0] * len(entries)
    power = _power(max(each["bits_resident"] for each in entries))
    for kind in KINDS:
        widths = [each["bits_by_kind"].get(kind, 0) / 10**power for each in entries]
        axes.barh(range(len(entries)), widths, 0.66, starts, color=colour(kind), label=kind)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_xlabel(f"bits resident, all ranks ({ten_to(power)})")
    _plain(axes)


def _rates(axes: Axes, entries: list[dict[str, Any]]) -> None:
    known = [each for each in entries if each["rate_per_job_hour"] is not None]
    power = _power(max((each["high"] for each in known), default=1.0))
    for row, each in enumerate(entries):
        if each["rate_per_job_hour"] is None:
            axes.text(0.02, row, "no cell of one fault", va="center", fontsize=8, transform=axes.get_yaxis_transform())
            continue
        rate, low, high = (each[key] / 10.0**power for key in ("rate_per_job_hour", "low", "high"))
        axes.errorbar(
            rate, row, xerr=[[max(0.0, rate - low)], [max(0.0, high - rate)]], fmt="o", markersize=4.5,
            elinewidth=1.3, color=colour("ink"), clip_on=False,
        )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_xlabel(f"harmful upsets in a job-hour ({ten_to(power)})")
    _plain(axes)


def _power(value: float) -> int:
    return math.floor(math.log10(value)) if value > 0 else 0


def _plain(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _says(entries: list[dict[str, Any]]) -> str:
    parts = [
        f"{each['parallel']}: {each['bits_resident']:,} bits, "
        + (
            "no rate"
            if each["rate_per_job_hour"] is None
            else f"{significant(each['rate_per_job_hour'])} harmful upsets in a job-hour, interval "
            f"{significant(each['low'])} to {significant(each['high'])}"
        )
        for each in entries
    ]
    return f"Bars of resident bits, and points with intervals of the rate of harm. {'; '.join(parts)}."


def _caption(material: Material, entries: list[dict[str, Any]]) -> Markup:
    fit, assumed = entries[0]["fit_per_mbit"], entries[0]["fit_assumed"]
    parts = [
        Markup("The rate is {} FIT per Mbit{} times the resident bits times the probability that one upset is harmful, "
               "from the cells with one fault; each weighs by the bits that it covers.").format(
            significant(fit), " (assumed: multiply by your machine's)" if assumed else ""
        )
    ]  # fmt: skip
    if any(each["reach"] == "all" for each in entries):
        parts.append(Markup("Where every copy was struck (reach all) it is taken for that of an upset in one copy."))
    return Markup(" ").join(parts)
