"""A uniform draw from units that are too many to keep: in one pass, at most one for each key."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flipper.faults.stream import U64, Stream
from flipper.faults.taken import Taken, first_occurrences

_SLACK = 1 << 16  # units kept beyond twice those wanted before the losers are thrown out
_LAST = np.uint64(2**64 - 1)


class Lottery:
    """Every unit that enters gets the stream's next word as its ticket; the lowest tickets win.

    Sorted by ticket, the units stand in a uniformly random order, and taking those whose key is free one
    after the other is drawing uniformly from what is left at each step. It has no slow end where few keys
    are left. Equal tickets are put in random order by further words, so the draw is exact.

    stream: spent by this draw alone. key: the element of a unit, never falling as units rise.
    taken: the keys that can't win. wanted: how many are to win. Memory: some arrays of 2 wanted + a block.
    """

    def __init__(self, stream: Stream, key: Callable[[U64], U64], taken: Taken, wanted: int) -> None:
        self.units = 0  # that entered
        self.keys = 0  # different ones among them
        self._stream = stream
        self._key = key
        self._taken = taken
        self._wanted = wanted
        self._last_key: int | None = None
        self._bound = _LAST  # a higher ticket has lost already
        self._kept = np.empty(0, dtype=np.uint64)
        self._tickets = np.empty(0, dtype=np.uint64)

    def enter(self, units: U64) -> None:
        """Give tickets to the next units: ascending, above all that entered before."""
        if not len(units):
            return
        tickets = self._stream.words(len(units))
        keys = self._key(units)
        self._count(keys)
        free = (tickets <= self._bound) & ~self._taken.holds(keys)
        self._kept = np.concatenate([self._kept, units[free]])
        self._tickets = np.concatenate([self._tickets, tickets[free]])
        if len(self._kept) > 2 * self._wanted + _SLACK:
            self._discard_losers()

    def winners(self) -> U64:
        """The units that won, best ticket first; fewer than wanted when too few keys were free."""
        self._discard_losers()
        units = self._kept[self._order()]
        return units[first_occurrences(self._key(units))][: self._wanted]

    def _count(self, keys: U64) -> None:
        self.units += len(keys)
        self.keys += 1 + int(np.count_nonzero(keys[1:] != keys[:-1])) - (int(keys[0]) == self._last_key)
        self._last_key = int(keys[-1])

    def _discard_losers(self) -> None:
        """Keep each key's best ticket, and of those the best that are wanted; equal ones stay all."""
        if not len(self._kept):
            return
        # The units kept are still ascending, so each key is one run.
        keys = self._key(self._kept)
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        best = np.minimum.reduceat(self._tickets, starts)
        stays = self._tickets == np.repeat(best, np.diff(starts, append=len(keys)))
        if len(best) > self._wanted:
            self._bound = np.partition(best, self._wanted - 1)[self._wanted - 1]
            stays &= self._tickets <= self._bound
        self._kept = self._kept[stays]
        self._tickets = self._tickets[stays]

    def _order(self) -> NDArray[np.intp]:
        """The order of the kept tickets; equal ones by words drawn until all are different."""
        order = np.argsort(self._tickets)
        if _all_differ(self._tickets[order]):
            return order
        more = self._stream.child("equal tickets")
        while True:
            second = more.words(len(self._tickets))
            order = np.lexsort((second, self._tickets))
            if _all_differ(self._tickets[order], second[order]):
                return order


def _all_differ(*columns: U64) -> bool:
    """Whether no two neighbours agree in every column."""
    same = np.ones(max(len(columns[0]) - 1, 0), dtype=np.bool_)
    for column in columns:
        same &= column[1:] == column[:-1]
    return not same.any()
