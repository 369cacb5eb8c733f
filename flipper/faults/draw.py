"""draw: a checkpoint, a fault model and a seed give a plan; the same one everywhere and for ever (flipper-draw/1)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

import numpy as np

from flipper.bits.layout import Bits
from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.elements import Int
from flipper.errors import NothingEligible, TooFewBits, UsageError
from flipper.faults import counts, sampling
from flipper.faults.candidates import Candidates, Guards
from flipper.faults.model import FIELDS, FaultModel
from flipper.faults.plan import FaultPlan, Stratum, Target
from flipper.faults.population import Population, Segment, Units, populate, with_masks
from flipper.faults.selection import Selection
from flipper.faults.stream import Stream
from flipper.faults.taken import first_occurrences

DRAW = "flipper-draw/1"
FIT_HOURS, MBIT = 10**9, 10**6


def new_seed() -> int:
    """A seed from the operating system, for a draw that was given none."""
    return secrets.randbits(64)


def population_of(checkpoint: Checkpoint, model: FaultModel) -> Population:
    """The eligible bits under a model.

    Raises UsageError when a bit position is named that a selected dtype lacks, or nothing matches a pattern.
    """
    tensors = model.selection.eligible(checkpoint.tensors)
    effect, spec = model.parsed_effect, model.bit_spec
    needed = effect.mask.bit_length() if effect.kind == "mask" else 0
    lacking = [t.name for t in tensors if spec.missing(t.layout) or needed > t.layout.width]
    if lacking:
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        what = f"--effect {model.effect}" if needed else f"--bits {model.bits}"
        raise UsageError(f"{what}: some positions don't exist in {shown}; leave these out by --exclude or --dtype")
    if effect.kind == "mask":
        ones = tuple(position for position in range(64) if effect.mask >> position & 1)
        return populate(tensors, lambda layout: ones)
    if effect.kind == "scale" and (whole := [t.name for t in tensors if not t.layout.real]):
        raise UsageError(f"--effect scale strikes floating-point tensors only, not {whole[0]}")
    return populate(tensors, spec.positions)


def draw(checkpoint: Checkpoint, model: FaultModel, seed: int | None = None) -> FaultPlan:
    """Draw the faults of a plan.

    seed: 0 <= seed < 2**64; None takes a new one, which the plan records.
    Raises NothingEligible for an empty population, TooFewBits when the amount can't be had, UsageError.
    """
    seed = new_seed() if seed is None else seed
    _ = Stream(seed, "")
    population = population_of(checkpoint, model)
    if not population.segments:
        raise NothingEligible(_nothing(checkpoint, model))
    faults = _Draw(checkpoint, model, seed, population).strata()
    return _plan(population, model, seed, list(faults))


def _nothing(checkpoint: Checkpoint, model: FaultModel) -> str:
    selected = model.selection.apply(checkpoint.tensors)
    kinds = sorted({tensor.dtype for tensor in selected})
    seen = f"{len(selected)} tensors selected, of dtype {', '.join(kinds) or 'none'}"
    return f"nothing to strike: {seen}; no bit of them is eligible under --bits {model.bits} (see --dtype)"


@dataclass(frozen=True)
class _Stratum:
    """A part of the population with its faults: segment numbers of `segments`, flat indexes, masks, values."""

    name: str
    segments: tuple[Segment, ...]
    units: int
    owner: Int
    flat: Int
    masks: Bits
    values: Bits


class _Draw:
    """One draw: the population is cut into strata, each gets its number of faults, each draws them."""

    def __init__(self, checkpoint: Checkpoint, model: FaultModel, seed: int, population: Population) -> None:
        self.checkpoint, self.model, self.seed = checkpoint, model, seed
        self.effect = model.parsed_effect
        limit = None if model.max_abs is None else float(counts.exact(model.max_abs))
        self.guards = Guards(model.finite, limit, model.direction)
        self.by_element = model.fraction is not None and self.effect.unit != "element"
        self.single = self.effect.unit == "window" or model.finite or limit is not None
        slots = with_masks(population, lambda s: self.effect.masks(s.tensor.layout, s.positions))
        if not slots.segments:
            raise NothingEligible(f"no element has {model.burst} neighbouring eligible bits for --burst {model.burst}")
        self.segments = slots.segments

    def strata(self) -> Iterator[_Stratum]:
        groups = self._groups()
        if self.model.spread in ("uniform", "per-layer"):
            for name, segments in groups:
                yield from self._stratum(name, segments, self._amount(name, segments))
            return
        total = self._amount("all", self.segments)
        weights = self._weights(groups)
        yield from self._allocated("groups", groups, total, weights)

    def _stratum(self, name: str, segments: Sequence[Segment], count: int) -> Iterator[_Stratum]:
        """One stratum, or one a field when fields have weights."""
        if self.model.field_weights is None:
            yield self._drawn(name, segments, count)
            return
        weights = {field: counts.exact(self.model.field_weights.get(field, 0)) for field in FIELDS}
        fields = [(f"{name}/{field}", _of_field(segments, field)) for field in FIELDS]
        kept = [(label, parts, weights[label.rsplit("/", 1)[1]]) for label, parts in fields if parts]
        groups = [(label, parts) for label, parts, _ in kept]
        yield from self._allocated(f"fields/{name}", groups, count, [weight for _, _, weight in kept])

    def _allocated(
        self, purpose: str, groups: Sequence[tuple[str, Sequence[Segment]]], count: int, weights: list[Fraction] | None
    ) -> Iterator[_Stratum]:
        """Strata whose numbers are drawn group by group among those not exhausted.

        A guard may exhaust a group before its size does; then its true capacity is known, and all is allotted anew.
        """
        capacities = [self._capacity(segments) for _, segments in groups]
        inner = self._stratum if purpose == "groups" else lambda n, s, c: iter([self._drawn(n, s, c)])
        while True:
            numbers = sampling.allocate(Stream(self.seed, purpose), capacities, count, weights)
            drawn: list[_Stratum] = []
            for index, (name, segments) in enumerate(groups):
                try:
                    drawn += inner(name, segments, int(numbers[index]))
                except TooFewBits as error:
                    if not self.guards and not self.single:
                        raise
                    capacities[index] = error.available
                    break
            else:
                yield from drawn
                return

    def _capacity(self, segments: Sequence[Segment]) -> int:
        per_element = self.single or self.by_element or self.effect.unit == "element"
        size: int = Units(segments, per_element=per_element).size
        return size

    def _drawn(self, name: str, segments: Sequence[Segment], count: int) -> _Stratum:
        units = Units(segments, per_element=self.by_element)
        values = Stream(self.seed, f"values/{name}")
        candidates = Candidates(self.checkpoint, units, self.effect, self.guards, values, self.by_element)
        chosen = self._chosen(candidates, Stream(self.seed, f"positions/{name}"), count)
        chosen = chosen if np.all(chosen[1:] >= chosen[:-1]) else np.sort(chosen)
        return _Stratum(name, units.segments, units.size, *candidates.faults(chosen))

    def _chosen(self, candidates: Candidates, stream: Stream, count: int) -> Bits:
        """The units that are struck; with a rate, guards thin the draw that would have been made without them."""
        units = candidates.units
        key = units.element_ids if self.single and not self.by_element and self.effect.unit != "element" else None
        thinned = self.guards and self.model.amount in ("ber", "fit")
        if self.guards and not thinned:
            return sampling.first_accepted(
                stream, units.size, count, key=key, accept=candidates.accept, enumerate_passing=candidates.passing
            )
        if key is not None and self.effect.unit == "window":  # windows of one element overlap
            chosen = sampling.first_accepted(stream, units.size, count, key=key)
        else:
            chosen = sampling.distinct(stream, units.size, count, keep_order=key is not None)
        if thinned:
            chosen = chosen[candidates.accept(chosen)]
        return chosen if key is None else chosen[first_occurrences(key(chosen))]

    def _groups(self) -> list[tuple[str, tuple[Segment, ...]]]:
        if self.model.spread == "uniform":
            return [("all", self.segments)]
        groups: dict[str, list[Segment]] = {}
        for segment in self.segments:
            by_tensor = self.model.spread == "tensor-uniform"
            groups.setdefault(segment.tensor.name if by_tensor else segment.tensor.layer, []).append(segment)
        return [(name, tuple(groups[name])) for name in sorted(groups)]

    def _weights(self, groups: Sequence[tuple[str, Sequence[Segment]]]) -> list[Fraction] | None:
        """The weight of each layer; the last pattern that fits one of its tensors, or its own name, counts."""
        if not self.model.weights:
            return None
        weights = {name: Fraction(0) for name, _ in groups}
        tensors = [segment.tensor for segment in self.segments]
        for pattern, weight in self.model.weights.items():
            for tensor in Selection(layers=(pattern,)).apply(tensors):
                weights[tensor.layer] = counts.exact(weight)
        return [weights[name] for name, _ in groups]

    def _amount(self, name: str, segments: Sequence[Segment]) -> int:
        model = self.model
        if model.count is not None:
            return model.count
        if model.fraction is not None:
            elements = sum(segment.elements for segment in segments)
            return floor(counts.exact(model.fraction) * elements + Fraction(1, 2))
        stream = Stream(self.seed, f"counts/{name}")
        if model.ber is not None:
            return counts.binomial(stream, Units(segments).size, counts.exact(model.ber))
        assert model.fit is not None
        assert model.hours is not None
        bits = sum(segment.bits for segment in segments)
        mean = counts.exact(model.fit) * counts.exact(model.hours) * bits / FIT_HOURS / MBIT
        return counts.poisson(stream, mean)


def _of_field(segments: Sequence[Segment], field: str) -> tuple[Segment, ...]:
    """The segments with their eligible bits of one field only."""
    cut = []
    for segment in segments:
        inside = set(segment.tensor.layout.positions(field))
        positions = tuple(position for position in segment.positions if position in inside)
        if positions:
            cut.append(replace(segment, positions=positions, masks=tuple(1 << position for position in positions)))
    return tuple(cut)


def _plan(population: Population, model: FaultModel, seed: int, strata: list[_Stratum]) -> FaultPlan:
    """The plan of all strata, its rows by tensor, element and bit."""
    numbers = {segment.tensor.name: index for index, segment in enumerate(population.segments)}
    target = np.concatenate(
        [np.array([numbers[segment.tensor.name] for segment in s.segments], np.int64)[s.owner] for s in strata]
    )
    flat = np.concatenate([s.flat for s in strata])
    masks = np.concatenate([s.masks for s in strata])
    values = np.concatenate([s.values for s in strata])
    if len(strata) > 1 or any(segment.own is not None for segment in population.segments):
        rank = np.lexsort((masks, flat, target))
        target, flat, masks, values = target[rank], flat[rank], masks[rank], values[rank]
    targets = tuple(Target(s.tensor.name, s.tensor.dtype, s.tensor.shape) for s in population.segments)
    ops = np.full(len(flat), model.parsed_effect.op, np.uint8)
    records = tuple(_record(s) for s in strata)
    return FaultPlan(targets, target, flat, ops, masks, values, seed, model.spec(), population.record(), records)


def _record(stratum: _Stratum) -> Stratum:
    bits = sum(segment.bits for segment in stratum.segments)
    return Stratum(stratum.name, bits, len(stratum.flat) / stratum.units if stratum.units else 0.0, len(stratum.flat))
