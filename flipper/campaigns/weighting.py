"""Weights of trials whose faults are not drawn uniformly, so that they speak of the whole population."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod
from pathlib import Path

from flipper.bits.layout import BitLayout
from flipper.checkpoints import open_checkpoint
from flipper.faults import counts
from flipper.faults.draw import population_of
from flipper.faults.model import FIELDS, FaultModel
from flipper.faults.plan import FaultPlan
from flipper.faults.population import Segment
from flipper.faults.selection import weights_of
from flipper.strict_json import text

Place = tuple[str, str]
"""A group of tensors that the draw takes from, and a field where these have weights ("" where not)."""


def weight_of(clean: Path, model: FaultModel, plan: FaultPlan) -> float:
    """How much rarer the plan's faults are under the model than under a uniform draw: the product over its faults.

    1 for a uniform draw, and where each layer has an amount of its own: that is no draw among layers.
    """
    if model.spread in ("uniform", "per-layer") and not model.field_weights:
        return 1.0
    parts = _parts(clean, text(model.spec()))
    struck = ((target.name, int(mask)) for target, rows in plan.by_target() for mask in plan.mask[rows])
    return prod(parts.weights[parts.place(name, mask)] for name, mask in struck)


@dataclass(frozen=True)
class _Parts:
    """The parts of a population. weights: a bit's density under a uniform draw over that under the model, by place."""

    layouts: dict[str, BitLayout]
    groups: dict[str, str]
    by_field: bool
    weights: dict[Place, float]

    def place(self, tensor: str, mask: int) -> Place:
        """Where a fault lies."""
        field = _field(self.layouts[tensor], mask.bit_length() - 1) if self.by_field else ""
        return self.groups[tensor], field


@lru_cache(maxsize=64)
def _parts(clean: Path, spec: str) -> _Parts:
    model = FaultModel(**json.loads(spec))
    segments = population_of(open_checkpoint(clean), model).segments
    groups = {segment.tensor.name: _group(model, segment) for segment in segments}
    of_field = {field: counts.exact(weight) for field, weight in (model.field_weights or {"": 1}).items()}
    by_field = model.field_weights is not None
    bits: dict[Place, int] = {}
    for segment in segments:
        for position in segment.positions:
            place = groups[segment.tensor.name], _field(segment.tensor.layout, position) if by_field else ""
            if of_field.get(place[1]):
                bits[place] = bits.get(place, 0) + segment.elements
    total = sum(bits.values())
    of_group = dict.fromkeys((group for group, _ in bits), Fraction(1))
    if model.weights:
        given = {pattern: counts.exact(weight) for pattern, weight in model.weights.items()}
        found = weights_of(given, [segment.tensor for segment in segments])
        of_group = {group: found.get(group, Fraction(0)) for group in of_group}
    weights = {}
    for group, field in bits:
        here = sum(of_field[other] for name, other in bits if name == group)
        chance = of_group[group] / sum(of_group.values()) * of_field[field] / here
        weights[group, field] = float(Fraction(bits[group, field], total) / chance) if chance else 0.0
    layouts = {segment.tensor.name: segment.tensor.layout for segment in segments}
    return _Parts(layouts, groups, by_field, weights)


def _group(model: FaultModel, segment: Segment) -> str:
    if model.spread == "uniform":
        return "all"
    return segment.tensor.name if model.spread == "tensor-uniform" else segment.tensor.layer


def _field(layout: BitLayout, position: int) -> str:
    return next(field for field in FIELDS if position in layout.positions(field))
