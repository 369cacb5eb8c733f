"""Replica divergence: how far data-parallel copies of the model are apart after the faults."""

from __future__ import annotations

import math
from typing import Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from flipper.report.axes import panels, powers_axis
from flipper.report.evidence import Divergence
from flipper.report.material import Material, Picture, shortened
from flipper.report.palette import colour

MOST: Final = 80
"""Runs of one kind that a panel shows."""

KINDS: Final = {"all": ("recovered", "solid"), "one": ("extreme", "solid"), "rank": ("non-finite", (0, (4, 1.5)))}
"""What the reach of a fault, one copy or all, is drawn as."""


def draw(material: Material) -> Picture | None:
    """A panel a layout, on a logarithmic axis that holds zero too."""
    by_layout: dict[str, list[Divergence]] = {}
    for each in material.evidence.divergences:
        by_layout.setdefault(each.trial.cell.parallel, []).append(each)
    if not by_layout:
        return None
    apart = [v for each in material.evidence.divergences for v in each.apart if math.isfinite(v) and v > 0]
    least, most = min(apart, default=1e-3), max(apart, default=1.0)
    figure, grid = panels(len(by_layout), 2.0)
    for axes, (layout, members) in zip(grid, by_layout.items(), strict=True):
        for kind in KINDS:
            _runs(axes, [each for each in members if kind_of(each) == kind], kind)
        axes.set_title(shortened(layout, 30))
    for axes in grid:
        low = 10.0 ** math.floor(math.log10(least))
        axes.set_yscale("symlog", linthresh=low)
        axes.yaxis.set_major_locator(FixedLocator(_ticks(low, most)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=-0.3 * low, top=2 * most)
        powers_axis(axes.yaxis)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("largest difference", fontsize=9)
    seen = [kind for kind in KINDS if any(kind_of(each) == kind for each in material.evidence.divergences)]
    handles = [Line2D([], [], color=colour(KINDS[kind][0]), ls=KINDS[kind][1], lw=1.4) for kind in seen]
    figure.legend(handles, [f"reach {kind}" for kind in seen], loc="outside upper center", ncols=3)
    return Picture("replicas", "Replicas apart", _says(material), _caption(material), figure)


def _ticks(low: float, high: float) -> list[float]:
    """Zero, and about five powers of ten."""
    first, last = round(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, round((last - first) / 5))
    return [0.0, *(10.0**power for power in range(first + step, last + 1, step))]


def kind_of(each: Divergence) -> str:
    """all, one, or rank for all faults in one rank."""
    reach = each.trial.run.reach
    return reach if reach in KINDS else "rank"


def _runs(axes: Axes, members: list[Divergence], kind: str) -> None:
    name, dashes = KINDS[kind]
    count = min(len(members), MOST)
    for each in (members[number * len(members) // count] for number in range(count)):
        axes.plot(
            each.steps, [v if math.isfinite(v) else math.nan for v in each.apart], color=colour(name),
            lw=1.4 if kind == "all" else 0.8, ls=dashes, alpha=0.8, clip_on=False,
        )  # fmt: skip


def tally(material: Material) -> list[tuple[str, str, int, int]]:
    """Layout, reach, how many runs were probed, and in how many the replicas were ever apart."""
    found: dict[tuple[str, str], list[bool]] = {}
    for each in material.evidence.divergences:
        found.setdefault((each.trial.cell.parallel, each.trial.run.reach), []).append(each.diverged)
    return [(layout, reach, len(each), sum(each)) for (layout, reach), each in found.items()]


def _says(material: Material) -> str:
    parts = [f"{layout}, reach {reach}: {apart} of {probed}" for layout, reach, probed, apart in tally(material)]
    return f"Lines of the largest difference between replicas by step. Runs whose replicas parted: {'; '.join(parts)}."


def _caption(material: Material) -> Markup:
    parts = [f"{apart} of {probed} under {layout}, reach {reach}" for layout, reach, probed, apart in tally(material)]
    return Markup(
        "The largest difference of any element between replicas, at every {} steps. Ever apart: {}. At most {} runs of "
        "a kind are drawn in a panel; the axis is linear below its lowest power of ten, so that zero can be shown."
    ).format(material.spec.probe_every, "; ".join(parts), MOST)
