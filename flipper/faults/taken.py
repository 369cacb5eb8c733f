"""Sets of drawn numbers, asked for many at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flipper.faults.stream import U64

_SMALL_SPAN = 1 << 24  # numbers below which one byte for each is never too much
_PER_MEMBER = 16  # bytes for each expected member that the fast map may take


class Taken:
    """A growing set of integers in [0, span).

    A byte for each possible member where that is small beside the members (and pages never touched cost
    nothing), else the sorted members. expected: how many there will be, roughly.
    """

    def __init__(self, span: int, expected: int) -> None:
        self._map = np.zeros(span, dtype=np.bool_) if self.small(span, expected) else None
        self._members = np.empty(0, dtype=np.uint64)

    @staticmethod
    def small(span: int, expected: int) -> bool:
        """Whether a byte for each number below span is a fair price for `expected` members."""
        return span <= max(_SMALL_SPAN, _PER_MEMBER * expected)

    def add(self, values: U64) -> None:
        """Put values in; they must be new and different from each other."""
        if self._map is not None:
            self._map[values] = True
        elif len(values):
            self._members = np.concatenate([self._members, np.sort(values)])
            self._members.sort(kind="stable")  # merges two sorted runs in one pass

    def holds(self, values: U64) -> NDArray[np.bool_]:
        """Which of the values are in the set, bool[len(values)]."""
        if self._map is not None:
            return self._map[values]
        if not len(self._members):
            return np.zeros(len(values), dtype=np.bool_)
        # Looking values up in ascending order keeps the search in cache: worth sorting them for.
        order = np.argsort(values)
        ascending = values[order]
        places = np.searchsorted(self._members, ascending)
        held = np.empty(len(values), dtype=np.bool_)
        held[order] = self._members[np.minimum(places, len(self._members) - 1)] == ascending
        return held


def first_occurrences(values: U64) -> NDArray[np.bool_]:
    """Which of the values have no equal before them, bool[len(values)]."""
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    first = np.ones(len(values), dtype=np.bool_)
    first[order[1:][ascending[1:] == ascending[:-1]]] = False
    return first
