"""Candidates: what each unit of a population would do to its element, and whether the guards let it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flipper.bits.layout import Bits
from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.elements import Int
from flipper.faults.effects import WRITE, Effect, strike
from flipper.faults.guards import Guards, Passed
from flipper.faults.philox import words_at
from flipper.faults.population import Segment, Units
from flipper.faults.stream import Stream

ENUMERATED = 1 << 18
"""Units that are tried together when all of them are."""

ATTEMPTS = 8
"""Slots of an element that are tried one by one, before all of them are looked at."""

_SLOT_MASKS = np.array([(1 << max(slots - 1, 0).bit_length()) - 1 for slots in range(65)], np.uint64)
"""For each number of slots the mask of the bits that number them."""


Columns = tuple[Int, Bits, Bits]
"""Flat indexes, masks and values of faults."""

Part = tuple[Segment, slice]
"""A segment, and which rows of the columns are the faults in it."""


@dataclass(frozen=True)
class Candidates:
    """The units of a stratum with all that decides about them.

    values: the stream that random values and slots come from, by element, so that they don't depend on the order
        in which candidates are looked at.
    slots_drawn: units are elements, and the slot in each comes from `values`: any of those that pass the guards.
    """

    checkpoint: Checkpoint
    units: Units
    effect: Effect
    guards: Guards
    values: Stream
    slots_drawn: bool = False

    def faults(self, units: Bits) -> tuple[Columns, tuple[Part, ...]]:
        """The faults of ascending units, and which are in which segment."""
        words = self._words(units)
        # In words of the elements' own width: ten million faults are large enough as they are.
        word = f"u{max(segment.tensor.layout.itemsize for segment in self.units.segments) or 1}"
        flat, masks, values = np.empty(len(units), np.int64), np.empty(len(units), word), np.zeros(len(units), word)
        parts = []
        for index, rows, element, slot in self.units.split(units):
            segment = self.units.segments[index]
            flat[rows] = segment.flat(element)
            if self.slots_drawn:
                slot = self._drawn_slots(segment, units[rows], flat[rows])
            masks[rows] = np.array(segment.masks, word)[slot]
            if self.effect.op == WRITE:  # else all values are zero, and take no memory before they are written
                tensor, random = segment.tensor, words[rows]
                before = self.checkpoint.read_bits(tensor, flat[rows]) if self.effect.needs_values else random
                values[rows] = self.effect.value(tensor.layout, masks[rows], before, random)
            parts.append((segment, rows))
        return (flat, masks, values), tuple(parts)

    def accept(self, units: Bits) -> Passed:
        """Which units pass the guards; reads the elements concerned and no others."""
        owner, element, slot = self.units.locate(units)
        words = self._words(units)
        ok = np.zeros(len(units), np.bool_)
        for index, rows in _rows_by_owner(owner):
            segment = self.units.segments[index]
            flat = segment.flat(element[rows])
            if self.slots_drawn:
                ok[rows] = self._drawn_slots(segment, units[rows], flat) >= 0
                continue
            before = self.checkpoint.read_bits(segment.tensor, flat)
            ok[rows] = self._passed(segment, before, np.array(segment.masks, np.uint64)[slot[rows]], words[rows])
        return ok

    def passing(self) -> Iterator[Bits]:
        """All units that pass the guards, ascending, in blocks; the checkpoint is streamed once."""
        for index, segment in enumerate(self.units.segments):
            step = max(ENUMERATED // len(segment.masks) // 8 * 8, 8)
            blocks = self._blocks(segment, step)
            for first, before in zip(range(0, segment.elements, step), blocks, strict=True):
                start = self.units.first_unit(index, first)
                last = first + len(before)
                units = np.arange(start, self.units.first_unit(index, last), dtype=np.uint64)
                table = self._table(segment, before, self._words(units))
                yield units[table.any(axis=1) if self.slots_drawn else table.ravel()]

    def _blocks(self, segment: Segment, step: int) -> Iterator[Bits]:
        """The elements that may be struck, `step` at a time."""
        if segment.own is None:
            yield from self.checkpoint.blocks(segment.tensor, step)
            return
        for first in range(0, len(segment.own), step):
            yield self.checkpoint.read_bits(segment.tensor, segment.own[first : first + step])

    def _words(self, units: Bits) -> Bits:
        """A random word for each unit's element, where the effect needs one."""
        return words_at(self.values, self.units.element_ids(units)) if self.effect.kind == "random" else units

    def _passed(self, segment: Segment, before: Bits, masks: Bits, words: Bits) -> Passed:
        layout = segment.tensor.layout
        after = strike(before, self.effect.op, masks, self.effect.value(layout, masks, before, words))
        return self.guards.passed(layout, before, after)

    def _table(self, segment: Segment, before: Bits, words: Bits) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Which slots of the elements pass the guards, bool[elements, slots]; words: one an element, where needed."""
        table = np.empty((len(before), len(segment.masks)), np.bool_)
        for slot, mask in enumerate(segment.masks):
            table[:, slot] = self._passed(segment, before, np.array([mask], np.uint64), words)
        return table

    def _drawn_slots(self, segment: Segment, units: Bits, flat: Int) -> Int:
        """A slot for each element, uniform among those that pass the guards; -1 where none does.

        Words of the element's own, masked; those out of range or refused by the guards are rejected, so it is exact.
        """
        ids = self.units.element_ids(units)
        masks = np.array(segment.masks, np.uint64)
        before = self.checkpoint.read_bits(segment.tensor, flat) if self.guards else ids
        chosen = np.full(len(units), -1, np.int64)
        rows = np.arange(len(units))
        attempt = 0
        while len(rows) and not (self.guards and attempt == ATTEMPTS):
            drawn = self._slot_words(f"slot {attempt}", ids[rows]) & _SLOT_MASKS[len(masks)]
            good = drawn < len(masks)
            inside = np.flatnonzero(good)
            if self.guards:
                good[inside] = self._passed(segment, before[rows[inside]], masks[drawn[inside]], before[rows[inside]])
            chosen[rows[good]] = drawn[good]
            rows = rows[~good]
            attempt += 1
        for first in range(0, len(rows), ENUMERATED // 64):
            part = rows[first : first + ENUMERATED // 64]
            chosen[part] = self._slots_of_table(self._table(segment, before[part], before[part]), ids[part])
        return chosen

    def _slots_of_table(self, table: np.ndarray[tuple[int, int], np.dtype[np.bool_]], ids: Bits) -> Int:
        counts = table.sum(axis=1)
        turn = np.zeros(len(ids), np.int64)  # which of the passing ones
        rows = np.flatnonzero(counts > 1)
        attempt = 0
        while len(rows):
            words = self._slot_words(f"passing slot {attempt}", ids[rows])
            drawn = (words & _SLOT_MASKS[counts[rows]]).astype(np.int64)
            good = drawn < counts[rows]
            turn[rows[good]] = drawn[good]
            rows = rows[~good]
            attempt += 1
        slots = np.argmax(np.cumsum(table, axis=1) == turn[:, None] + 1, axis=1)
        return np.where(counts > 0, slots, -1)

    def _slot_words(self, purpose: str, ids: Bits) -> Bits:
        return words_at(self.values.child(purpose), ids)


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
