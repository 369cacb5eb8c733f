"""Population: the eligible bits of a checkpoint as one flat index space, independent of container and file order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flipper.bits.layout import BitLayout, Bits
from flipper.checkpoints.elements import Int
from flipper.checkpoints.tensor import Tensor
from flipper.errors import UsageError
from flipper.faults.overlap import distinct_elements


@dataclass(frozen=True)
class Segment:
    """What may be struck in one tensor.

    masks: the slots of an element, each the bits that one fault strikes there: one bit, a burst, or all of them.
    positions: the eligible bits of an element. own: flat indexes of the elements that count, None for all.
    """

    tensor: Tensor
    positions: tuple[int, ...]
    masks: tuple[int, ...]
    own: Int | None = None

    @property
    def elements(self) -> int:
        """How many elements may be struck."""
        return self.tensor.elements if self.own is None else len(self.own)

    @property
    def bits(self) -> int:
        """How many bits may be struck."""
        return self.elements * len(self.positions)

    def flat(self, elements: Int) -> Int:
        """Flat indexes in the tensor of this segment's elements 0, 1, 2, ..."""
        return elements if self.own is None else self.own[elements]


@dataclass(frozen=True)
class Population:
    """All eligible bits, by tensor name.

    segments: tensors without an eligible bit are left out.
    """

    segments: tuple[Segment, ...]

    @property
    def bits(self) -> int:
        """Number of eligible bits."""
        return sum(segment.bits for segment in self.segments)

    @property
    def elements(self) -> int:
        """Number of elements that have an eligible bit."""
        return sum(segment.elements for segment in self.segments)

    def record(self) -> dict[str, Any]:
        """Its size, as `inspect` and the manifest print it."""
        by_role: dict[str, int] = {}
        for segment in self.segments:
            by_role[segment.tensor.role] = by_role.get(segment.tensor.role, 0) + segment.bits
        return {
            "tensors": len(self.segments),
            "elements": self.elements,
            "bits": self.bits,
            "bits_by_role": dict(sorted(by_role.items())),
        }


def populate(tensors: Sequence[Tensor], positions: Callable[[BitLayout], tuple[int, ...]]) -> Population:
    """The population of eligible bits: `positions` says which bits of an element are."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    eligible = {dtype: positions(layout) for dtype, layout in {t.dtype: t.layout for t in ordered}.items()}
    masks = {dtype: tuple(1 << position for position in found) for dtype, found in eligible.items()}
    # A view without an eligible bit must not take its bytes away from another that has some.
    own = distinct_elements([tensor for tensor in ordered if eligible[tensor.dtype]])
    segments = []
    for tensor in ordered:
        segment = Segment(tensor, eligible[tensor.dtype], masks[tensor.dtype], own.get(tensor.name))
        if segment.bits:
            segments.append(segment)
    return Population(tuple(segments))


def with_masks(population: Population, masks: Callable[[Segment], tuple[int, ...]]) -> Population:
    """The same elements with other slots, which depend on dtype and positions; elements without any are left out."""
    kinds = {(segment.tensor.dtype, segment.positions): segment for segment in population.segments}
    found = {kind: masks(segment) for kind, segment in kinds.items()}
    pairs = [(s, found[s.tensor.dtype, s.positions]) for s in population.segments]
    changed = [s if s.masks == slots else replace(s, masks=slots) for s, slots in pairs]
    return Population(tuple(segment for segment in changed if segment.masks))


def of_fields(segments: Sequence[Segment], fields: set[str]) -> tuple[Segment, ...]:
    """The segments with their eligible bits of these fields only, each bit a slot; those without any are left out."""
    cut = []
    for segment in segments:
        inside = {position for field in fields for position in segment.tensor.layout.positions(field)}
        positions = tuple(position for position in segment.positions if position in inside)
        if positions:
            cut.append(replace(segment, positions=positions, masks=tuple(1 << position for position in positions)))
    return tuple(cut)


class Units:
    """A flat index space 0 .. size-1 over (segment, element, slot), ordered by tensor name, element, slot.

    per_element: one unit for each element, whatever its slots. slots: how many an element of each segment has.
    first_elements: the number of each segment's first element, when all elements are counted.
    """

    def __init__(self, segments: Sequence[Segment], per_element: bool = False) -> None:
        self.segments = tuple(segments)
        self.slots = np.array([len(segment.masks) for segment in segments], np.int64)
        counts = [segment.elements for segment in segments]
        self._per_element = np.ones(len(counts), np.int64) if per_element else self.slots
        sizes = [count * slots for count, slots in zip(counts, self._per_element.tolist(), strict=True)]
        self.size = sum(sizes)
        if self.size >= 1 << 63:
            raise UsageError(f"{self.size} places to strike are more than 2**63; select less")
        self._starts = _starts(sizes)
        self.first_elements = _starts(counts)

    def locate(self, units: Bits) -> tuple[Int, Int, Int]:
        """Segment number, element number in the segment and slot of each unit (int64 each)."""
        within = units.astype(np.int64)
        if np.all(within[1:] >= within[:-1]):
            ends = np.searchsorted(within, [*self._starts[1:], self.size])
            owner = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        else:
            owner = np.searchsorted(self._starts, within, side="right") - 1
        within -= self._starts[owner]
        first = self._per_element[0]
        # Dividing by one number is several times faster than by as many as there are units.
        each = first if np.all(self._per_element == first) else self._per_element[owner]
        element = within // each
        return owner, element, within - element * each

    def split(self, units: Bits) -> Iterator[tuple[int, slice, Int, Int]]:
        """Each segment that has some of the ascending units: its number, their rows, elements and slots (int64)."""
        bounds = np.array([*self._starts[1:].tolist(), self.size], np.uint64)
        ends = np.searchsorted(units, bounds).tolist()
        for index, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            if first < last:
                within = units[first:last].astype(np.int64)
                within -= self._starts[index]
                element = within // self._per_element[index]
                within -= element * self._per_element[index]  # several times faster than divmod
                yield index, slice(first, last), element, within

    def element_ids(self, units: Bits) -> Bits:
        """A number for each unit's element, the same for all its units and for no other; ascends with the units."""
        owner, element, _ = self.locate(units)
        return (self.first_elements[owner] + element).astype(np.uint64)

    def first_unit(self, owner: int, element: int) -> int:
        """The first unit of an element."""
        return int(self._starts[owner]) + element * int(self._per_element[owner])


def _starts(sizes: Sequence[int]) -> Int:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))))[: len(sizes)]
