"""Candidates: what each unit of a population would do to its element, and whether the guards let it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flipper.bits import BitLayout
from flipper.bits.layout import Bits
from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.elements import Int
from flipper.faults.effects import Effect, strike
from flipper.faults.philox import words_at
from flipper.faults.population import Units
from flipper.faults.stream import Stream

Passed = np.ndarray[tuple[int], np.dtype[np.bool_]]

ENUMERATED = 1 << 16
"""Elements whose every unit is tried together."""


@dataclass(frozen=True)
class Guards:
    """Conditions on the struck element. finite: it is a finite number. max_abs: bound on its magnitude.
    direction: "0to1" or "1to0", the only way in which bits may change (and one does)."""

    finite: bool = False
    max_abs: float | None = None
    direction: str | None = None

    def __bool__(self) -> bool:
        return self.finite or self.max_abs is not None or self.direction is not None

    def passed(self, layout: BitLayout, before: Bits, after: Bits) -> Passed:
        """Which of the changes the guards let through."""
        ok = np.ones(after.shape, np.bool_)
        if self.direction is not None:
            gone, new = before & ~after, after & ~before
            wanted, unwanted = (new, gone) if self.direction == "0to1" else (gone, new)
            ok &= (wanted != 0) & (unwanted == 0)
        if self.finite:
            ok &= layout.is_finite(after)
        if self.max_abs is not None:
            ok &= np.abs(layout.decode(after).astype(np.float64)) <= self.max_abs
        return ok


@dataclass(frozen=True)
class Candidates:
    """The units of a stratum with all that decides about them.

    values: the stream that random values and slots come from, by element, so that they don't depend on the order
        in which candidates are looked at.
    slots_drawn: units are elements, and the slot in each comes from `values`.
    """

    checkpoint: Checkpoint
    units: Units
    effect: Effect
    guards: Guards
    values: Stream
    slots_drawn: bool = False

    def faults(self, units: Bits) -> tuple[Int, Int, Bits, Bits]:
        """Segment number, flat index, mask and value of each unit's fault."""
        owner, element, slot = self.units.locate(units)
        flat, masks, values = element, np.zeros(len(units), np.uint64), np.zeros(len(units), np.uint64)
        if self.slots_drawn:
            slot = self._drawn_slots(units, self.units.slots[owner])
        for index, rows in _rows_by_owner(owner):
            segment = self.units.segments[index]
            flat[rows] = segment.flat(element[rows])
            masks[rows] = np.array(segment.masks, np.uint64)[slot[rows]]
            if self.effect.needs_values:
                before = self.checkpoint.read_bits(segment.tensor, flat[rows])
                values[rows] = self.effect.value(segment.tensor.layout, masks[rows], before, before)
        if not self.effect.needs_values:
            words = words_at(self.values, self.units.element_ids(units)) if self.effect.kind == "random" else masks
            values = self.effect.value(self.units.segments[0].tensor.layout, masks, masks, words)
        return owner, flat, masks, values

    def accept(self, units: Bits) -> Passed:
        """Which units pass the guards; reads the elements concerned and no others."""
        owner, flat, masks, values = self.faults(units)
        ok = np.zeros(len(units), np.bool_)
        for index, rows in _rows_by_owner(owner):
            tensor = self.units.segments[index].tensor
            before = self.checkpoint.read_bits(tensor, flat[rows])
            after = strike(before, self.effect.op, masks[rows], values[rows])
            ok[rows] = self.guards.passed(tensor.layout, before, after)
        return ok

    def passing(self) -> Iterator[Bits]:
        """All units that pass the guards, ascending, in blocks; the checkpoint is streamed once."""
        for index, segment in enumerate(self.units.segments):
            per_element = 1 if self.slots_drawn else len(segment.masks)
            step = max(ENUMERATED // per_element, 1)
            for first in range(0, segment.elements, step):
                last = min(first + step, segment.elements)
                start, end = self.units.first_unit(index, first), self.units.first_unit(index, last)
                units = np.arange(start, end, dtype=np.uint64)
                yield units[self.accept(units)]

    def _drawn_slots(self, units: Bits, slots: Int) -> Int:
        """A uniform slot for each element: words of its own, masked and rejected, so that it is exact."""
        chosen = np.full(len(units), -1, np.int64)
        attempt = 0
        while len(open_rows := np.flatnonzero(chosen < 0)):
            words = words_at(self.values.child(f"slot {attempt}"), self.units.element_ids(units[open_rows]))
            choices = slots[open_rows]
            drawn = (words & _SLOT_MASKS[choices]).astype(np.int64)
            inside = drawn < choices
            chosen[open_rows[inside]] = drawn[inside]
            attempt += 1
        return chosen


_SLOT_MASKS = np.array([(1 << max(slots - 1, 0).bit_length()) - 1 for slots in range(65)], np.uint64)
"""For each number of slots the mask of the bits that number them."""


def _rows_by_owner(owner: Int) -> Iterator[tuple[int, slice | Int]]:
    """Each segment that occurs, with its rows; one slice a segment when the rows are in order."""
    if len(owner) == 0:
        return
    rank = None if np.all(owner[1:] >= owner[:-1]) else np.argsort(owner, kind="stable")
    ordered = owner if rank is None else owner[rank]
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    for first, last in pairwise(edges):
        rows = slice(first, last) if rank is None else rank[first:last]
        yield int(ordered[first]), rows
