"""Heat map: the harmful share of trials by the bit position and the layer that they struck."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Patch, Rectangle

from flipper.report.axes import new_figure, percent_axis
from flipper.report.evidence import FEW, Evidence, Place, Struck
from flipper.report.material import Material, Picture, shortened
from flipper.report.numbers import given
from flipper.report.palette import SHARES, colour, share_colour
from flipper.statistics.intervals import wilson

MOST: Final = 40
"""Rows at most."""

TENSORS: Final = 24
"""With more tensors than this, those of a layer stand together."""

Places = Mapping[Place, Struck]


def draw(material: Material) -> Picture | None:
    """Layers below each other, bits beside each other, the highest at the left as numbers are written."""
    places = by_row(material.evidence)
    if not places:
        return None
    bits_alone = by_bit(material.evidence)
    rows = _rows(places)
    bits = range(max(bit for _, bit in places), min(bit for _, bit in places) - 1, -1)
    figure = new_figure(0.19 * len(rows) + 2.5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, max(0.19 * len(rows), 0.5)])
    _draw_bits(above, bits_alone, material.spec.confidence)
    _map(below, places, rows)
    below.set(xlim=(bits[0] + 0.5, bits[-1] - 0.5), ylim=(len(rows) - 0.5, -0.5))
    step = 1 if len(bits) <= 24 else 2
    below.set_xticks([bit for bit in bits if bit % step == 0])
    below.set_yticks(range(len(rows)), [shortened(row, 34) for row in rows])
    below.set_xlabel("bit position (0 is the least significant)")
    below.tick_params(length=0)
    for spine in below.spines.values():
        spine.set_visible(False)
    handles = [Patch(facecolor=colour(name)) for name, _ in SHARES]
    edges = [given(100 * most) for _, most in SHARES]
    labels = ["0%", *(f"to {edge}%" for edge in edges[1:])]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, title="harmful share of the trials that struck the place",
        title_fontsize=8.5, handlelength=1.3, columnspacing=1.2,
    )  # fmt: skip
    return Picture(
        "bits-by-layer", "Harm by bit position and layer", _says(material, bits_alone), _caption(material, rows), figure
    )


def by_row(evidence: Evidence) -> dict[Place, Struck]:
    """By tensor and bit, or where there are many tensors by layer and bit, in natural order, high bits first."""
    found = evidence.tally(lambda place: place)
    if len({tensor for tensor, _ in found}) > TENSORS:
        found = evidence.tally(lambda place: (layer_of(place[0]), place[1]))
    return {place: found[place] for place in sorted(found, key=lambda place: (_natural(place[0]), -place[1]))}


def by_bit(evidence: Evidence) -> dict[int, Struck]:
    """By bit, over all layers."""
    return dict(sorted(evidence.tally(lambda place: place[1]).items()))


def layer_of(tensor: str) -> str:
    """The module that owns a tensor: its name without the last component."""
    cut = max(tensor.rfind("."), tensor.rfind("/"))
    return tensor[:cut] if cut > 0 else tensor


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts layer2 before layer10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def _rows(places: Places) -> list[str]:
    """The rows, the most struck ones where there are too many."""
    struck: dict[str, int] = {}
    for (row, _), each in places.items():
        struck[row] = struck.get(row, 0) + each.trials
    kept = set(sorted(struck, key=lambda row: -struck[row])[:MOST])
    return [row for row in struck if row in kept]


def _map(axes: Axes, places: Places, rows: list[str]) -> None:
    where = {row: number for number, row in enumerate(rows)}
    squares, colours = [], []
    for (row, bit), struck in places.items():
        if row in where:
            squares.append(Rectangle((bit - 0.47, where[row] - 0.45), 0.94, 0.9))
            colours.append(share_colour(struck.harmful / struck.trials))
    axes.add_collection(PatchCollection(squares, facecolors=colours, edgecolors="none"))


def _draw_bits(axes: Axes, bits: Mapping[int, Struck], confidence: float) -> None:
    """Over all layers: points with intervals."""
    for bit, struck in bits.items():
        share, interval = struck.harmful / struck.trials, wilson(struck.harmful, struck.trials, confidence)
        axes.errorbar(
            bit, share, yerr=[[max(0.0, share - interval.low)], [max(0.0, interval.high - share)]], fmt="o",
            markersize=3.5, color=colour("extreme" if struck.harmful else "muted"), elinewidth=1, clip_on=False,
        )  # fmt: skip
    percent_axis(axes.yaxis)
    axes.set(ylim=(0, 1), ylabel="harmful,\nall layers")
    axes.grid(axis="y")
    axes.tick_params(axis="x", length=0, labelbottom=False)
    axes.spines["bottom"].set_visible(False)


def _says(material: Material, bits: Mapping[int, Struck]) -> str:
    harmful = sorted((bit for bit, struck in bits.items() if struck.harmful), reverse=True)
    few = material.evidence.few
    bad = sum(harm for harm, _ in few)
    if not harmful:
        return f"A map of bits by layers. None of the {len(few)} trials with few faults was harmful."
    worst = max(harmful, key=lambda bit: (bits[bit].harmful / bits[bit].trials, bits[bit].trials))
    return (
        f"A map of bits by layers, from {len(few)} trials with few faults, of which {bad} were harmful. "
        f"The bit with the highest harmful share is {worst}: {bits[worst].harmful} of {bits[worst].trials}. "
        f"Bits struck in harmful trials: {', '.join(map(str, harmful))}."
    )


def _caption(material: Material, rows: list[str]) -> Markup:
    few, all_trials = material.evidence.few, len(material.results.trials)
    bad = sum(harm for harm, _ in few)
    parts = [
        Markup("From the {} of {} trials with at most {} faults, over all layouts together ({} of them harmful). "
               "A trial with several faults counts in each place that it struck, so a harmless place beside a harmful "
               "one looks harmful too. Blank: not struck. In float32, bit 31 is the sign, 30 to 23 the exponent, "
               "22 to 0 the mantissa.").format(f"{len(few):,}", f"{all_trials:,}", FEW, f"{bad:,}")
    ]  # fmt: skip
    if len(rows) == MOST:
        parts.append(Markup("The {} most struck rows are drawn.").format(MOST))
    return Markup(" ").join(parts)
