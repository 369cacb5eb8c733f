"""Figures of a study: times, bytes, and the share of time that checkpoints and failures take at any interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from flipper.report.axes import new_figure, percent_axis
from flipper.report.material import Picture
from flipper.report.numbers import percent, significant
from flipper.report.palette import colour
from flipper.study.checkpoint import Study

MOST: Final = 60
"""Rows that are drawn."""

LINES: Final = 6
"""Combinations whose waste is drawn."""

ROW: Final = 0.3
"""Inches of a row."""

Row = dict[str, Any]

TIMES: Final = {
    "stall_seconds": ("training stands still", "extreme", "D"),
    "save_seconds": ("save", "parameters", "o"),
    "load_seconds": ("load, in the cache", "optimizer", "s"),
    "cold_load_seconds": ("load, from the disk", "degraded", "^"),
}
"""What is timed: its name on the page, colour and marker."""

HUES: Final = ("parameters", "extreme", "optimizer", "degraded", "recovered", "non-finite")


def duration(seconds: float | None) -> str:
    """Seconds for people."""
    if seconds is None or not math.isfinite(seconds):
        return significant(seconds)
    for least, unit, factor in (
        (86400, "d", 86400),
        (3600, "h", 3600),
        (60, "min", 60),
        (1, "s", 1),
        (1e-3, "ms", 1e-3),
    ):
        if abs(seconds) >= least:
            return f"{significant(seconds / factor)} {unit}"
    return f"{significant(seconds / 1e-6)} µs"


def amount(size: float | None) -> str:
    """Bytes for people, by powers of ten."""
    if size is None:
        return significant(None)
    for least, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= least:
            return f"{significant(float(size) / least)} {unit}"
    return f"{size:.0f} B"


def label(row: Row) -> str:
    """How a row is saved."""
    return str(row["format"]) + (", async" if row["mode"] == "async" else "") + (", fsync" if row["fsync"] else "")


def setting(row: Row) -> str:
    """What is saved, and from how many ranks."""
    return f"content {row['content']}, {row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"


def called(row: Row) -> str:
    """Both."""
    return f"{label(row)} ({setting(row)})"


def exact(rows: Sequence[Row]) -> list[Row]:
    """The rows that can be compared: those from which a run goes on to the bit, where that is known and there are any.

    To save less is quicker, and no use to such a run.
    """
    return [row for row in rows if row["deterministic"]] or list(rows)


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, Row | None]]:
    """Lines from above: headings without a row, and the rows under them."""
    together: dict[str, list[Row]] = {}
    for row in rows[:MOST]:
        together.setdefault(setting(row), []).append(row)
    for heading, members in together.items():
        yield heading, None
        for row in members:
            yield label(row), row


def times(study: Study) -> Picture:
    """Medians of what was timed, with the range of the repeats."""
    listed = list(lines(study.rows))
    figure = new_figure(ROW * len(listed) + 1.1)
    axes = figure.subplots()
    shown = [name for name in TIMES if name != "stall_seconds" or any(r["mode"] == "async" for r in study.rows)]
    for place, name in enumerate(shown):
        _ranges(axes, listed, name, (place - (len(shown) - 1) / 2) * 0.17)
    _named(axes, listed)
    axes.set_xscale("log")
    _log_axis(axes.xaxis)
    axes.set_xlabel("time, logarithmic")
    figure.legend(loc="outside upper left", ncols=4, handlelength=1.3, columnspacing=1.2)
    best = min(exact(study.rows), key=lambda row: float(row["save_seconds"]))
    says = (
        f"Points with ranges, for each of {len(study.rows)} combinations. The quickest save is {called(best)}: "
        f"{duration(best['save_seconds'])}. The table below has all numbers."
    )
    return Picture("times", "What saving and loading take", says, _caption(study), figure)


def _ranges(axes: Axes, listed: Sequence[tuple[str, Row | None]], name: str, shift: float) -> None:
    text, hue, marker = TIMES[name]
    known = [
        (at + shift, row)
        for at, (_, row) in enumerate(listed)
        if row is not None and row[name] and (name != "stall_seconds" or row["mode"] == "async")
    ]
    middles = [row[name] for _, row in known]
    below = [row[name] - row[f"{name}_low"] for _, row in known]
    above = [row[f"{name}_high"] - row[name] for _, row in known]
    axes.errorbar(
        middles, [at for at, _ in known], xerr=[below, above], fmt=marker, markersize=4, color=colour(hue), label=text,
        elinewidth=1.2, linestyle="none",
    )  # fmt: skip


def _caption(study: Study) -> Markup:
    parts = [
        f"The median of {study.spec.repeat} and their range. Loading from the disk: after the file was put out of the "
        "page cache."
    ]
    if len(study.rows) > MOST:
        parts.append(f"Drawn for the first {MOST} of {len(study.rows)} combinations.")
    return Markup(" ").join(parts)


def sizes(study: Study) -> Picture:
    """Bytes of the checkpoint, and of memory that saving takes."""
    listed = list(lines(study.rows))
    figure = new_figure(ROW * len(listed) + 1.1)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, name, hue, label in (
        (left, "bytes", "parameters", "bytes of the checkpoint"),
        (right, "peak_bytes", "optimizer", "memory that saving takes"),
    ):
        known = [(at, row) for at, (_, row) in enumerate(listed) if row is not None and row[name] is not None]
        axes.barh([at for at, _ in known], [row[name] for _, row in known], 0.6, color=colour(hue))
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value) if value else "0"))
        axes.set_xlim(left=0)
        _named(axes, listed)
    right.tick_params(axis="y", labelleft=False)
    small, large = (pick(study.rows, key=lambda row: row["bytes"]) for pick in (min, max))
    says = (
        f"Bars of bytes. The smallest checkpoint is {called(small)}: {amount(small['bytes'])}; the largest "
        f"{called(large)}: {amount(large['bytes'])}."
    )
    caption = Markup("Memory: beside the state, of the rank that takes most, at its highest while it saves.")
    return Picture("sizes", "Bytes on the disk and in memory", says, caption, figure)


def waste(study: Study) -> Picture | None:
    """The share of time lost to checkpoints and to failures, by the interval between checkpoints."""
    mtbf = study.spec.mtbf
    rows = sorted(
        (row for row in exact(study.rows) if row["stall_seconds"]), key=lambda row: float(row["stall_seconds"])
    )
    if mtbf is None or not rows:
        return None
    chosen = [
        rows[number * (len(rows) - 1) // max(1, min(LINES, len(rows)) - 1)] for number in range(min(LINES, len(rows)))
    ]
    figure = new_figure(3.0)
    axes = figure.subplots()
    least = min(row["interval_seconds"] for row in chosen) / 10
    most = max(row["interval_seconds"] for row in chosen) * 10
    intervals = [least * (most / least) ** (step / 200) for step in range(201)]
    for row, hue in zip(chosen, HUES, strict=False):
        stall, best = row["stall_seconds"], row["interval_seconds"]
        shares = [min(1.0, stall / each + each / (2 * mtbf)) for each in intervals]
        axes.plot(intervals, shares, color=colour(hue), lw=1.3, label=called(row))
        axes.plot([best], [min(1.0, stall / best + best / (2 * mtbf))], "o", markersize=4.5, color=colour(hue))
    axes.set_xscale("log")
    axes.set_yscale("log")
    _log_axis(axes.xaxis)
    percent_axis(axes.yaxis)
    axes.yaxis.set_major_locator(LogLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid()
    axes.set(xlabel="interval between checkpoints", ylabel="share of time lost")
    figure.legend(loc="outside upper left", ncols=1 if len(chosen) > 4 else 2, fontsize=7.5)
    first = chosen[0]
    share = first["stall_seconds"] / first["interval_seconds"] + first["interval_seconds"] / (2 * mtbf)
    says = (
        f"Curves with a lowest point each. For {called(first)} it is at an interval of "
        f"{duration(first['interval_seconds'])}, where {percent(share)} of the time is lost."
    )
    caption = Markup(
        "To first order, stall / interval + interval / (2 MTBF), with an MTBF of {}; the point is Young's and Daly's "
        "interval. What a restart takes comes on top, at any interval."
    ).format(duration(mtbf))
    return Picture("waste", "How often to save", says, caption, figure)


def _named(axes: Axes, listed: Sequence[tuple[str, Row | None]]) -> None:
    """Names of the rows at the left, and a heading above each group."""
    rows = [at for at, (_, row) in enumerate(listed) if row is not None]
    axes.set_yticks(rows, [listed[at][0] for at in rows])
    axes.set_ylim(len(listed) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    for at, (label, row) in enumerate(listed):
        if row is None and axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.text(0.0, at + 0.1, label, va="center", fontweight="bold", fontsize=8.5,
                      transform=axes.get_yaxis_transform())  # fmt: skip


def _log_axis(axis: Axis) -> None:
    """Of seconds, by powers of ten; with what lies between them where there are few."""
    least, most = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if most < 100 * least else (1.0,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axis.set_minor_formatter(NullFormatter())


def _tick(seconds: float) -> str:
    for least, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.999 * least:
            return f"{seconds / least:,.0f} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
