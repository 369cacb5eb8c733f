"""BitSpec: which bits of an element may be struck, as `--bits` says it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flipper.bits.layout import BitLayout
from flipper.errors import UsageError

FIELDS = ("any", "sign", "exponent", "mantissa", "exponent-msb", "mantissa-msb")
_RANGE = re.compile(r"([0-9]{1,3})(?:-([0-9]{1,3}))?")


@dataclass(frozen=True)
class BitSpec:
    """A comma list of fields, positions and ranges; parsed once, applied to each dtype.

    text: the list as the user wrote it, such as "sign,exponent-msb", "30" or "23-30".
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise UsageError(f"--bits: {self.text!r} is not text; write '30' for position 30, commas between several")
        for term in self._terms():
            _explicit(term)

    def positions(self, layout: BitLayout) -> tuple[int, ...]:
        """Positions in an element of this dtype, ascending; a field that the dtype lacks adds none."""
        found: set[int] = set()
        for term in self._terms():
            explicit = _explicit(term)
            if explicit is not None:
                found.update(position for position in explicit if position < layout.width)
            elif term.endswith("-msb"):
                found.update(layout.positions(term.removesuffix("-msb"))[-1:])
            else:
                found.update(layout.positions(term))
        return tuple(sorted(found))

    def missing(self, layout: BitLayout) -> tuple[int, ...]:
        """Positions named outright that an element of this dtype doesn't have."""
        named = [position for term in self._terms() for position in _explicit(term) or ()]
        return tuple(sorted({position for position in named if position >= layout.width}))

    def _terms(self) -> list[str]:
        return [term.strip() for term in self.text.split(",")]


def _explicit(term: str) -> range | None:
    """The positions that a term names outright, or None for a field; raises UsageError for anything else."""
    if term in FIELDS:
        return None
    match = _RANGE.fullmatch(term)
    if not match:
        raise UsageError(f"--bits: {term!r} is none of {', '.join(FIELDS)}, a position like 30, a range like 23-30")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise UsageError(f"--bits: the range {term} is empty; write the lower position first")
    return range(first, last + 1)
