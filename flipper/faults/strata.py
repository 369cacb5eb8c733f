"""Strata: a population is cut into parts, each gets its number of faults, and each draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np

from flipper.checkpoints.checkpoint import Checkpoint
from flipper.errors import NothingEligible, TooFewBits, UsageError
from flipper.faults import counts, sampling
from flipper.faults.candidates import Candidates, Columns, Part
from flipper.faults.fields import FieldUnits, one_an_element
from flipper.faults.guards import Guards, Passed
from flipper.faults.model import FIELDS, FaultModel
from flipper.faults.nested import nested
from flipper.faults.population import Population, Segment, Units, of_fields, with_masks
from flipper.faults.selection import weights_of
from flipper.faults.stream import U64, Stream
from flipper.faults.taken import first_occurrences

FIT_HOURS, MBIT = 10**9, 10**6
MOST = 10**9
"""Faults of one draw: above, the plan alone would fill some 40 GB."""

BLOCK = 1 << 20
"""Units whose guards are looked at together."""

Group = tuple[str, tuple[Segment, ...]]
"""A name and the segments that it covers."""


@dataclass(frozen=True)
class Drawn:
    """A stratum with its faults, of which each part is a segment's; units, bits: how many of them it had."""

    name: str
    units: int
    bits: int
    columns: Columns
    parts: tuple[Part, ...]

    @property
    def faults(self) -> int:
        """How many were drawn."""
        return len(self.columns[0])


class Strata:
    """The strata of one draw."""

    def __init__(self, checkpoint: Checkpoint, model: FaultModel, seed: int, population: Population) -> None:
        self.checkpoint, self.model, self.seed = checkpoint, model, seed
        self.effect = model.parsed_effect
        limit = None if model.max_abs is None else counts.exact(model.max_abs)
        self.guards = Guards(model.finite, limit, model.direction)
        self.by_element = model.fraction is not None and self.effect.unit != "element"
        self.by_count = model.amount in ("count", "fraction")
        self.nests = model.spread != "uniform" or model.field_weights is not None
        at_most_one = self.effect.unit == "window" or model.finite or limit is not None
        self.shared_elements = at_most_one and not self.by_element and self.effect.unit != "element"
        """Whether an element has several units of which one only may be struck."""
        self.field_weights = {f: counts.exact(w) for f, w in (model.field_weights or {}).items() if counts.exact(w)}
        self.segments = self._slots(population)

    def drawn(self) -> Iterator[Drawn]:
        """All strata with their faults; raises TooFewBits when the amount can't be had."""
        if self.model.spread == "uniform":
            yield from self._stratum("all", self.segments, self._amount("all", self.segments))
        elif self.model.spread == "per-layer":
            for name, segments in self._groups():
                try:
                    yield from self._stratum(name, segments, self._amount(name, segments))
                except TooFewBits as error:
                    raise TooFewBits(f"layer {name}: {error}", error.available) from error
        else:
            groups, total = self._groups(), self._amount("all", self.segments)
            yield from self._dealt("groups", groups, total, self._layer_weights(groups), self._stratum)

    def _slots(self, population: Population) -> tuple[Segment, ...]:
        if self.field_weights:
            segments = of_fields(population.segments, set(self.field_weights))
            if not segments:
                fields = ", ".join(sorted(self.field_weights))
                raise NothingEligible(f"--field-weight: no eligible bit is of the fields with a weight ({fields})")
            return segments
        segments = with_masks(population, lambda s: self.effect.masks(s.tensor.layout, s.positions)).segments
        if not segments:
            raise NothingEligible(
                f"no element has {self.model.burst} neighbouring eligible bits for --burst {self.model.burst}"
            )
        return segments

    def _groups(self) -> list[Group]:
        groups: dict[str, list[Segment]] = {}
        for segment in self.segments:
            by_tensor = self.model.spread == "tensor-uniform"
            groups.setdefault(segment.tensor.name if by_tensor else segment.tensor.layer, []).append(segment)
        return [(name, tuple(groups[name])) for name in sorted(groups)]

    def _layer_weights(self, groups: Sequence[Group]) -> list[Fraction] | None:
        """The weight of each layer; of several patterns that fit it the last counts."""
        if not self.model.weights:
            return None
        given = {pattern: counts.exact(weight) for pattern, weight in self.model.weights.items()}
        weights = weights_of(given, [segment.tensor for segment in self.segments])
        return [weights.get(name, Fraction(0)) for name, _ in groups]

    def _amount(self, name: str, segments: Sequence[Segment]) -> int:
        model = self.model
        if model.count is not None:
            room = self._capacity(segments)
            return model.count if model.count > room else floor(_bounded(Fraction(model.count)))
        if model.fraction is not None:
            elements = sum(segment.elements for segment in segments)
            return floor(_bounded(counts.exact(model.fraction) * elements) + Fraction(1, 2))
        stream = Stream(self.seed, f"counts/{name}")
        if model.ber is not None:
            size, rate = Units(segments).size, counts.exact(model.ber)
            _bounded(rate * size)
            return counts.binomial(stream, size, rate)
        upsets = counts.exact(model.fit or 0) * counts.exact(model.hours or 0) / FIT_HOURS / MBIT
        return counts.poisson(stream, _bounded(upsets * sum(segment.bits for segment in segments)))

    def _stratum(self, name: str, segments: Sequence[Segment], n: int) -> list[Drawn]:
        """n faults in one layer, tensor or the whole; one stratum, or one a field when fields have weights."""
        if not self.field_weights:
            return [self._plain(name, segments, n)]
        if self.shared_elements:
            return self._fields_apart(name, segments, n)
        fields = self._fields(name, segments)
        weights = [weight for _, weight in fields]
        groups = [group for group, _ in fields]
        return self._dealt(f"fields/{name}", groups, n, weights, lambda *stratum: [self._plain(*stratum)])

    def _fields(self, name: str, segments: Sequence[Segment]) -> list[tuple[Group, Fraction]]:
        parts = ((field, of_fields(segments, {field})) for field in FIELDS if field in self.field_weights)
        return [((f"{name}/{field}", part), self.field_weights[field]) for field, part in parts if part]

    def _dealt(
        self,
        purpose: str,
        groups: Sequence[Group],
        n: int,
        weights: list[Fraction] | None,
        inner: Callable[[str, Sequence[Segment], int], list[Drawn]],
    ) -> list[Drawn]:
        """Strata whose numbers are drawn group by group among those not exhausted.

        A guard may exhaust a group before its size does; then its true capacity is known, and all is dealt anew,
        which leaves everything as it was up to the fault that could not be had.
        """
        capacities = [self._capacity(segments) for _, segments in groups]
        made: dict[int, tuple[int, list[Drawn]]] = {}
        while True:
            numbers = self._numbers(purpose, groups, capacities, n, weights).tolist()
            shortage = False
            for index, (name, segments) in enumerate(groups):
                if index in made and made[index][0] == numbers[index]:
                    continue
                try:
                    made[index] = numbers[index], inner(name, segments, numbers[index])
                except TooFewBits as error:
                    capacities[index] = min(error.available, numbers[index] - 1)
                    shortage = True
            if not shortage:
                return [stratum for index in range(len(groups)) for stratum in made[index][1]]

    def _numbers(
        self, purpose: str, groups: Sequence[Group], capacities: list[int], n: int, weights: list[Fraction] | None
    ) -> U64:
        try:
            return sampling.allocate(Stream(self.seed, purpose), capacities, n, weights)
        except TooFewBits:
            if not self.guards:
                raise
        able = [group for index, group in enumerate(groups) if weights is None or weights[index]]
        passing = sum(self._passing(name, segments) for name, segments in able)
        where = " elements" if self._per_element else " places"
        raise TooFewBits(f"{n:,} asked for, but only {passing:,}{where} pass; ask for fewer faults", passing)

    @property
    def _per_element(self) -> bool:
        return self.shared_elements or self.by_element or self.effect.unit == "element"

    def _capacity(self, segments: Sequence[Segment]) -> int:
        size: int = Units(segments, per_element=self._per_element).size
        return size

    def _passing(self, name: str, segments: Sequence[Segment]) -> int:
        """How many faults the guards let through."""
        try:
            self._plain(name, segments, self._capacity(segments) + 1)
        except TooFewBits as error:
            return error.available
        raise AssertionError("more faults than units")

    def _plain(self, name: str, segments: Sequence[Segment], n: int) -> Drawn:
        """n faults, all units alike."""
        units = Units(segments, per_element=self.by_element)
        candidates = self._candidates(name, units)
        stream = Stream(self.seed, f"positions/{name}")
        key = units.element_ids if self.shared_elements else None
        room = self._capacity(segments)
        if self.by_count and n > room and not self.guards:
            raise TooFewBits(f"{n:,} asked for, but only {room:,} can be struck; ask for fewer faults", room)
        if not self.by_count:
            chosen = self._independent(stream, n, candidates)
        elif self.guards:
            chosen = sampling.first_accepted(
                stream, units.size, n, key=key, accept=candidates.accept, enumerate_passing=candidates.passing
            )
        elif key is not None:
            chosen = sampling.first_accepted(stream, units.size, n, key=key)
        else:
            chosen = (nested if self.nests else sampling.distinct)(stream, units.size, n)
        return _faults(name, candidates, chosen)

    def _independent(self, stream: Stream, n: int, candidates: Candidates) -> U64:
        """What is left of n unguarded units, as many as --ber or --fit gave: those that pass, one an element.

        Of several in one element the first in the order of the draw stays, each of them equally likely.
        """
        units = candidates.units
        if not self.shared_elements and not self.nests:
            chosen = sampling.distinct(stream, units.size, n)
        else:
            chosen = nested(stream, units.size, n, keep_order=self.shared_elements)
        if self.guards:
            chosen = chosen[_accepted(candidates, chosen)]
        if self.shared_elements:
            chosen = chosen[first_occurrences(units.element_ids(chosen))]
        return chosen

    def _candidates(self, name: str, units: Units) -> Candidates:
        values = Stream(self.seed, f"values/{name}")
        return Candidates(self.checkpoint, units, self.effect, self.guards, values, self.by_element)

    def _fields_apart(self, name: str, segments: Sequence[Segment], n: int) -> list[Drawn]:
        """n faults that pick their field by weight, of which no two may share an element."""
        if n > self._capacity(segments):
            return [self._plain(name, segments, n)]  # says how many there can be
        parts = self._fields(name, segments)
        shares = sampling.whole_shares([weight for _, weight in parts], len(parts))
        everywhere = {s.tensor.name: start for s, start in zip(segments, Units(segments).first_elements, strict=True)}
        candidates = [self._candidates(label, Units(part)) for (label, part), _ in parts]
        fields = [
            self._field_units(each, label, share, everywhere)
            for each, ((label, _), _), share in zip(candidates, parts, shares, strict=True)
        ]
        struck = one_an_element(Stream(self.seed, f"fields/{name}"), fields, n)
        return [_faults(each.name, part, struck[each.name]) for each, part in zip(fields, candidates, strict=True)]

    def _field_units(self, candidates: Candidates, label: str, share: int, elements: dict[str, int]) -> FieldUnits:
        """elements: the number of each tensor's first element, which is the same in all fields."""
        units = candidates.units
        starts = np.array([elements[segment.tensor.name] for segment in units.segments], np.int64)

        def ordered(n: int) -> U64:
            return sampling.first_accepted(
                Stream(self.seed, f"positions/{label}"), units.size, n,
                key=units.element_ids, accept=candidates.accept, enumerate_passing=candidates.passing,
            )  # fmt: skip

        def element_ids(chosen: U64) -> U64:
            owner, element, _ = units.locate(chosen)
            return (starts[owner] + element).astype(np.uint64)

        return FieldUnits(label, share, units.size, ordered, element_ids)


def _bounded(expected: Fraction) -> Fraction:
    """The same number of faults; refused before anything is drawn when memory could not hold them."""
    if expected > MOST:
        raise UsageError(f"these would be more faults than a plan can hold ({MOST:,}); ask for fewer, or select less")
    return expected


def _accepted(candidates: Candidates, units: U64) -> Passed:
    """Which of many units pass the guards, asked in ascending order and in blocks."""
    rank = np.argsort(units)
    passed = np.empty(len(units), np.bool_)
    for first in range(0, len(units), BLOCK):
        rows = rank[first : first + BLOCK]
        passed[rows] = candidates.accept(units[rows])
    return passed


def _faults(name: str, candidates: Candidates, chosen: U64) -> Drawn:
    units = candidates.units
    if not np.all(chosen[1:] >= chosen[:-1]):
        chosen = np.sort(chosen)
    bits = sum(segment.bits for segment in units.segments)
    return Drawn(name, units.size, bits, *candidates.faults(chosen))
