"""Heat map: what is left of the allreduce's throughput, by where on the mesh the hole is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from flipper.mesh.chips import Hole
from flipper.mesh.picture import MARGIN, WIDEST, WIDTH, Picture, colour, written
from flipper.mesh.study import Case

LOSSES: Final = (0.02, 0.05, 0.1, 0.2, 1.0)
"""Shares of throughput that are lost; each shade goes up to one of these."""


def heat_maps(cases: Sequence[Case]) -> Iterator[tuple[str, Picture]]:
    """For each shape, algorithm, model and size of hole: what it is, and a square for each place of the hole."""
    for title, group in _groups(cases):
        yield title, _heat_map(title, group)


def _groups(cases: Sequence[Case]) -> Iterator[tuple[str, list[Case]]]:
    def title(case: Case) -> str:
        hole, training = case.question.holes[0], case.question.training
        what = "" if training is None else f", {training.model}"
        return f"{case.question.algorithm} on {case.question.shape}, a hole of {hole.rows}x{hole.columns}{what}"

    alone = [case for case in cases if len(case.question.holes) == 1]
    yield from ((name, list(group)) for name, group in itertools.groupby(sorted(alone, key=title), key=title))


def _heat_map(title: str, cases: Sequence[Case]) -> Picture:
    mesh = cases[0].question.mesh
    places = {(hole.row, hole.column) for case in cases for hole in case.question.holes}
    pitch = min(WIDEST / 2, (WIDTH - 2 * MARGIN) / mesh.columns)
    down, right = (_step({place[axis] for place in places}) for axis in (0, 1))
    parts = [written(MARGIN, 22, title, 15, "ink", weight="600")]
    for case in cases:
        parts.append(_square(case, case.question.holes[0], pitch, down, right))
    foot = 34 + pitch * (max(row for row, _ in places) + down) + 20
    parts += _legend(foot)
    width = max(pitch * (max(column for _, column in places) + right) + 2 * MARGIN, 520.0)
    return Picture("".join(parts), width, foot + 12)


def _step(places: set[int]) -> int:
    """The distance between neighbouring places."""
    ordered = sorted(places)
    return min((b - a for a, b in itertools.pairwise(ordered)), default=1)


def _square(case: Case, hole: Hole, pitch: float, down: int, right: int) -> str:
    kept = case.efficiency
    says = f"{hole}: " + ("not served" if kept is None else f"{100 * kept:.3g} % of the intact mesh")
    fill = colour("failed") if kept is None else colour(f"loss{_shade(1 - kept)}")
    return (
        f'<rect x="{MARGIN + pitch * hole.column:.1f}" y="{34 + pitch * hole.row:.1f}" width="{pitch * right - 1:.1f}" '
        f'height="{pitch * down - 1:.1f}" fill="{fill}"><title>{says}</title></rect>'
    )


def _shade(loss: float) -> int:
    return next((number for number, most in enumerate(LOSSES) if loss <= most), len(LOSSES) - 1)


def _legend(top: float) -> Iterator[str]:
    x = MARGIN
    for number, most in enumerate(LOSSES):
        words = f"up to {100 * most:g} % lost" if number < len(LOSSES) - 1 else "more"
        fill = colour(f"loss{number}")
        yield f'<rect x="{x:.1f}" y="{top - 10:.1f}" width="11" height="11" fill="{fill}"/>'
        yield written(x + 16, top, words, 11.5, "muted")
        x += 34 + 6.3 * len(words)
