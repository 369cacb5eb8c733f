"""Picture: a mesh with its rings, what hangs on them, and the ways round its holes, as SVG.

Colours are variables with a default, so that the picture stands alone as a file and follows the page that it is in.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from flipper.mesh.chips import Mesh, Route
from flipper.mesh.schedule import Schedule

WIDTH: Final = 960.0
WIDEST: Final = 34.0
"""Between the centres of neighbours, at most."""
MARGIN: Final = 26.0
FEWEST: Final = 12.0
"""Between centres, below which arrows and numbers are left out."""

COLOURS: Final = {
    "paper": "#fefefe", "ink": "#1c2127", "muted": "#66707c", "grid": "#dce0e5", "ring0": "#4a8fc7", "ring1": "#00a896",
    "hung": "#7a6f9b", "detour": "#d55e00", "failed": "#2f2f33", "column": "#b9c2cb", "loss0": "#e9ecef",
    "loss1": "#fbdba0", "loss2": "#f4a65a", "loss3": "#d9602b", "loss4": "#8f1d2c",
}  # fmt: skip
"""Name -> its colour where the page gives none, as the variable --mesh-NAME."""


def colour(name: str) -> str:
    """A colour as CSS has it."""
    return f"var(--mesh-{name}, {COLOURS[name]})"


@dataclass(frozen=True)
class Picture:
    """SVG elements that fill `width` x `height`."""

    body: str
    width: float
    height: float

    def inline(self, label: str) -> str:
        """For a page."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        return f'<svg role="img" aria-label="{escape(label)}" {size}>{self.body}</svg>'


def document(pictures: Sequence[Picture]) -> str:
    """A file that has the pictures below each other."""
    width = max(each.width for each in pictures)
    height = sum(each.height for each in pictures)
    tops = itertools.accumulate((each.height for each in pictures), initial=0.0)
    inner = "".join(
        f'<g transform="translate(0 {top:g})">{each.body}</g>' for top, each in zip(tops, pictures, strict=False)
    )
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}"><rect width="100%" height="100%" fill="{colour("paper")}"/>{inner}</svg>\n'
    )
    return re.sub(r"var\(--mesh-\w+, (#\w+)\)", r"\1", text)  # programs that draw SVG mostly know no variables


def picture(schedule: Schedule, title: str = "") -> Picture:
    """The schedule on its mesh. title: written above it."""
    drawn = _Drawing(schedule.mesh)
    top = 34.0 if title else 8.0
    parts = [written(MARGIN, 22, title, 15, "ink", weight="600")] if title else []
    parts.append(f'<g transform="translate({MARGIN:g} {top:g})">')
    parts += drawn.links()
    parts += drawn.columns(schedule)
    parts += drawn.rings(schedule)
    parts += drawn.hung(schedule)
    parts += drawn.detours(schedule)
    parts += drawn.chips()
    parts.append("</g>")
    height = top + drawn.height
    legend, rows = _legend(schedule, height + 20, drawn.width)
    return Picture("".join([*parts, *legend]), max(drawn.width + 2 * MARGIN, 460.0), height + 20 + 22 * rows)


class _Drawing:
    """The mesh on paper: chip (row, column) stands at pitch * (column, row), half a pitch from the edge."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.pitch = min(WIDEST, (WIDTH - 2 * MARGIN) / mesh.columns)
        self.fine = self.pitch >= FEWEST
        self.width = self.pitch * mesh.columns
        self.height = self.pitch * mesh.rows

    def at(self, chip: int) -> tuple[float, float]:
        row, column = self.mesh.place(chip)
        return self.pitch * (column + 0.5), self.pitch * (row + 0.5)

    def links(self) -> Iterator[str]:
        """All that still work, as thin lines."""
        lines = []
        for chip in self.mesh.survivors:
            for other in self.mesh.linked[chip]:
                if other > chip:
                    (x, y), (to_x, to_y) = self.at(chip), self.at(other)
                    lines.append(f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}")
        yield _path("".join(lines), "grid", 1.0)

    def columns(self, schedule: Schedule) -> Iterator[str]:
        """The links of the second phase, wherever rings of the first are linked without a detour."""
        crossed: set[tuple[int, int]] = set()
        for phase in schedule.phases:
            if phase.name.startswith("columns"):
                pairs = zip(phase.lanes.source.tolist(), phase.lanes.target.tolist(), strict=True)
                crossed.update(pair for pair in pairs if pair[0] < pair[1] and pair not in phase.routes)
        lines = []
        for one, other in sorted(crossed):
            (x, y), (to_x, to_y) = self.at(one), self.at(other)
            lines.append(f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}")
        yield _path("".join(lines), "column", max(1.0, self.pitch / 12))

    def rings(self, schedule: Schedule) -> Iterator[str]:
        routes = schedule.ring_routes or {}
        for number, ring in enumerate(schedule.rings):
            hops = list(zip(ring, (*ring[1:], *ring[:1]), strict=True)) if len(ring) > 1 else []
            short = [pair for pair in hops if pair not in routes]
            shade = f"ring{number % 2}"
            yield _path("".join(self._hop(*pair) for pair in short), shade, max(1.2, self.pitch / 9))
            if self.fine:
                yield _filled("".join(self._arrow(*pair) for pair in short[:: max(1, len(short) // 40)]), shade)

    def hung(self, schedule: Schedule) -> Iterator[str]:
        lines = "".join(self._hop(chip, parent) for chip, parent in schedule.hung)
        yield _path(lines, "hung", max(1.0, self.pitch / 12), dashes=f"{self.pitch / 6:.1f} {self.pitch / 9:.1f}")
        if self.fine:
            yield _filled("".join(self._arrow(*pair) for pair in schedule.hung), "hung")

    def detours(self, schedule: Schedule) -> Iterator[str]:
        """Ways round holes, and hops of a ring over other chips, each a little beside the links that it takes."""
        ways: set[Route] = set(schedule.detours()) | set((schedule.ring_routes or {}).values())
        once = sorted({min(way, way[::-1]) for way in ways})
        for number, way in enumerate(once):
            shift = self.pitch * 0.09 * (number % 5 - 2)
            points = [self.at(chip) for chip in way]
            start, *rest = [(x + shift, y + shift) for x, y in points]
            line = f"M{start[0]:.1f} {start[1]:.1f}" + "".join(f"L{x:.1f} {y:.1f}" for x, y in rest)
            yield _path(line, "detour", max(1.0, self.pitch / 16))

    def chips(self) -> Iterator[str]:
        side = max(1.6, self.pitch * 0.42)
        ranks = {chip: rank for rank, chip in enumerate(self.mesh.survivors)}
        for chip in range(self.mesh.size):
            x, y = self.at(chip)
            row, column = self.mesh.place(chip)
            alive = chip in ranks
            what = f"chip {row},{column}: " + (f"rank {ranks[chip]}" if alive else "failed")
            fill, edge = ("paper", "muted") if alive else ("failed", "failed")
            yield (
                f'<rect x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" width="{side:.1f}" height="{side:.1f}" '
                f'rx="{side / 6:.1f}" fill="{colour(fill)}" stroke="{colour(edge)}" stroke-width="{side / 12:.1f}">'
                f"<title>{what}</title></rect>"
            )
        failed = (self.at(chip) for chip in sorted(self.mesh.failed))
        half = side * 0.28
        crosses = "".join(f"M{x - half:.1f} {y - half:.1f}l{2 * half:.1f} {2 * half:.1f}m0 {-2 * half:.1f}"
                          f"l{-2 * half:.1f} {2 * half:.1f}" for x, y in failed)  # fmt: skip
        yield _path(crosses, "paper", max(0.8, side / 9))

    def _hop(self, one: int, other: int) -> str:
        """A line, or where it passes over other chips, an arc on its left."""
        (x, y), (to_x, to_y) = self.at(one), self.at(other)
        if abs(x - to_x) + abs(y - to_y) < 1.5 * self.pitch:
            return f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"
        across, up = (to_y - y) * 0.28, (x - to_x) * 0.28
        return f"M{x:.1f} {y:.1f}Q{(x + to_x) / 2 + across:.1f} {(y + to_y) / 2 + up:.1f} {to_x:.1f} {to_y:.1f}"

    def _arrow(self, one: int, other: int) -> str:
        """A triangle in the middle of a line between neighbours, that points along it."""
        (x, y), (to_x, to_y) = self.at(one), self.at(other)
        if abs(x - to_x) + abs(y - to_y) > 1.5 * self.pitch:
            return ""
        size = 0.16 * self.pitch
        along = (to_x - x) / self.pitch * size, (to_y - y) / self.pitch * size
        tip = (x + to_x) / 2 + along[0], (y + to_y) / 2 + along[1]
        left = tip[0] - 1.7 * along[0] - along[1], tip[1] - 1.7 * along[1] + along[0]
        right = tip[0] - 1.7 * along[0] + along[1], tip[1] - 1.7 * along[1] - along[0]
        return f"M{tip[0]:.1f} {tip[1]:.1f}L{left[0]:.1f} {left[1]:.1f}L{right[0]:.1f} {right[1]:.1f}Z"


def _legend(schedule: Schedule, top: float, width: float) -> tuple[list[str], int]:
    """What the colours mean, for those that are there; and its lines."""
    entries = [("ring0", "ring", False)]
    if len(schedule.rings) > 1:
        entries = [("ring0", "rings of the first phase", False), ("column", "second phase, across them", False)]
    if schedule.hung:
        entries.append(("hung", "hangs on a ring", True))
    if schedule.ring_routes:
        entries.append(("detour", "hop over other chips", False))
    elif any(True for _ in schedule.detours()):
        entries.append(("detour", "way round the hole", False))
    parts, x, row = [], MARGIN, 0
    for shade, words, dashed in entries:
        length = 44 + 7.2 * len(words)
        if x > MARGIN and x + length > max(width + MARGIN, 440):
            x, row = MARGIN, row + 1
        y = top + 22 * row
        parts.append(_path(f"M{x:.1f} {y - 4:.1f}h22", shade, 3.0, dashes="5 3" if dashed else ""))
        parts.append(written(x + 28, y, words, 12.5, "muted"))
        x += length
    if schedule.mesh.failed:
        y = top + 22 * row
        parts.append(f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="11" height="11" rx="2" fill="{colour("failed")}"/>')
        parts.append(written(x + 17, y, "failed", 12.5, "muted"))
    return parts, row + 1


def _path(line: str, shade: str, width: float, dashes: str = "") -> str:
    if not line:
        return ""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<path d="{line}" fill="none" stroke="{colour(shade)}" stroke-width="{width:.1f}" stroke-linejoin="round" '
        f'stroke-linecap="round"{dashed}/>'
    )


def _filled(line: str, shade: str) -> str:
    return f'<path d="{line}" fill="{colour(shade)}"/>' if line else ""


def written(x: float, y: float, words: str, size: float, shade: str, weight: str = "400") -> str:
    """Text whose baseline begins there."""
    family = 'font-family="DejaVu Sans, Verdana, sans-serif"'
    return (
        f'<text x="{x:g}" y="{y:g}" {family} font-size="{size:g}" font-weight="{weight}" fill="{colour(shade)}">'
        f"{escape(words)}</text>"
    )
