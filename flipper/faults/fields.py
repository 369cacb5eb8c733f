"""Faults that pick their field by weight where an element takes one fault only, whatever its field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flipper.errors import TooFewBits
from flipper.faults.stream import U64, Stream


@dataclass
class FieldUnits:
    """The units of one field in the order in which they are to be struck.

    weight: a whole number above 0. size: how many units there are at most.
    ordered: the first n units that pass the guards, one an element, in stream order; raises TooFewBits.
    element_ids: a number for each unit's element, the same in all fields.
    """

    name: str
    weight: int
    size: int
    ordered: Callable[[int], U64]
    element_ids: Callable[[U64], U64]
    _queue: list[tuple[int, int]] = field(default_factory=list)
    _complete: bool = False

    def next_free(self, taken: set[int], expected: int) -> int | None:
        """The next unit whose element is not taken, which is taken then; None when there is none left."""
        while True:
            while self._queue:
                unit, element = self._queue.pop()
                if element not in taken:
                    taken.add(element)
                    return unit
            if self._complete:
                return None
            self._refill(len(taken) + expected)

    def _refill(self, n: int) -> None:
        """Begin again with a longer queue; what was struck meanwhile is skipped, since its element is taken."""
        self._complete = n >= self.size
        try:
            units = self.ordered(min(n, self.size))
        except TooFewBits as error:
            units, self._complete = self.ordered(error.available), True
        pairs = zip(units.tolist(), self.element_ids(units).tolist(), strict=True)
        self._queue = list(pairs)[::-1]


def one_an_element(stream: Stream, fields: Sequence[FieldUnits], n: int) -> dict[str, U64]:
    """The units struck in each field, when n faults one after the other pick a field with room by weight.

    Each then takes the next unit of its field whose element is free, so the doses nest. A field without one is
    left out from then on. Raises TooFewBits, with the number of elements that can be struck, when all are.
    """
    left = list(fields)
    taken: set[int] = set()
    struck: dict[str, list[int]] = {each.name: [] for each in fields}
    missing = n
    while missing:
        if not left:
            raise TooFewBits(f"{n:,} asked for, but only {n - missing:,} elements can be struck", n - missing)
        edges = np.cumsum([each.weight for each in left], dtype=np.uint64)
        start = stream.position
        picks = np.searchsorted(edges, stream.below(int(edges[-1]), missing), side="right")
        expected = np.bincount(picks, minlength=len(left)).tolist()
        for used, pick in enumerate(picks.tolist()):
            unit = left[pick].next_free(taken, expected[pick])
            if unit is None:
                stream.seek(start)  # give back the words that were read ahead, after the one that picked in vain
                stream.below(int(edges[-1]), used + 1)
                del left[pick]
                missing -= used
                break
            struck[left[pick].name].append(unit)
        else:
            missing = 0
    return {name: np.array(units, np.uint64) for name, units in struck.items()}
