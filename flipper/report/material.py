"""Material: what a report is made of; and how its cells are named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from flipper.campaigns.cells import Cell, canonical
from flipper.campaigns.folder import Campaign
from flipper.campaigns.results import Results, load_results
from flipper.campaigns.spec import Spec
from flipper.campaigns.summary import summary
from flipper.errors import printable
from flipper.report.evidence import Evidence, gather
from flipper.report.numbers import given

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure


SELF_EVIDENT: Final = ("role", "bits")
"""Axes whose values need no name beside them."""


@dataclass(frozen=True)
class Material:
    """Results, their numbers as `report --format json` prints them, and what figures need beside."""

    results: Results
    numbers: Mapping[str, Any]
    evidence: Evidence

    @property
    def campaign(self) -> Campaign:
        """What was asked for."""
        return self.results.campaign

    @property
    def spec(self) -> Spec:
        """How it was asked for."""
        return self.campaign.spec

    @property
    def confidence(self) -> str:
        """That of all intervals, in per cent."""
        return f"{given(100 * self.spec.confidence)}%"

    @property
    def margin(self) -> str:
        """That of equivalence, in percentage points."""
        return f"\u00b1{given(100 * self.spec.equivalence)}"

    @cached_property
    def layouts(self) -> list[str]:
        """All layouts, in the campaign's order."""
        return list(dict.fromkeys(cell.parallel for cell in self.campaign.cells))

    @cached_property
    def varied(self) -> tuple[str, ...]:
        """The axes, but for the layout, that set cells apart."""
        return varied(self.campaign.cells, self.results.axes)

    @cached_property
    def common(self) -> str:
        """What all cells have in common, in words; "" where there is nothing."""
        first = self.campaign.cells[0].axes
        return described(first, [axis for axis in first if axis != "parallel" and axis not in self.varied])


@dataclass(frozen=True)
class Picture:
    """A figure. name: of its files. title: what it shows. says: the same for people who can't see it.

    caption: how to read it.
    """

    name: str
    title: str
    says: str
    caption: Markup
    figure: Figure


def material_of(campaign: Campaign) -> Material:
    """Read and judge what a campaign has stored.

    Raises UsageError when nothing was stored, OutputError for a damaged database.
    """
    results = load_results(campaign)
    return Material(results, summary(results), gather(results))


def varied(cells: Sequence[Cell], axes: Iterable[str]) -> tuple[str, ...]:
    """The axes with more than one value, the layout apart."""
    return tuple(
        axis
        for axis in axes
        if axis != "parallel" and len({canonical(cell.axes.get(axis)) for cell in cells}) > 1
    )  # fmt: skip


def described(axes: Mapping[str, Any], names: Iterable[str]) -> str:
    """Some axes in words: `parameter, exponent, count 10`."""
    return ", ".join(
        value_text(axes[name]) if name in SELF_EVIDENT else f"{name} {value_text(axes[name])}"
        for name in names
        if axes.get(name) is not None
    )


def value_text(value: Any) -> str:
    """The value of an axis for people, on one line."""
    if isinstance(value, list | tuple):
        return " + ".join(map(value_text, value))
    return printable(canonical(value) if isinstance(value, dict) else str(value))


def shortened(text: str, most: int = 42) -> str:
    """The text on one line, with its middle left out where it is too long: names differ at their ends."""
    text = printable(text)
    if len(text) <= most:
        return text
    return f"{text[: most // 3]}\u2026{text[len(text) - (most - most // 3 - 1) :]}"
