"""Census: every eligible bit of a checkpoint once, by its number."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flipper.checkpoints import open_checkpoint
from flipper.errors import NothingEligible, UsageError
from flipper.faults.draw import population_of
from flipper.faults.model import FaultModel
from flipper.faults.plan import FaultPlan, Target
from flipper.faults.population import Units


def bits_of(clean: Path, model: FaultModel) -> int:
    """How many eligible bits there are."""
    return population_of(open_checkpoint(clean), model).bits


def nth_bit(clean: Path, model: FaultModel, number: int) -> FaultPlan:
    """The fault in the eligible bit of this number, from 0, by tensor name, element and position."""
    population = population_of(open_checkpoint(clean), model)
    units = Units(population.segments)
    if not units.size:
        raise NothingEligible("nothing to strike: no bit is eligible")
    if not 0 <= number < units.size:
        raise UsageError(f"no eligible bit {number}; there are {units.size}")
    owner, element, slot = (int(each[0]) for each in units.locate(np.array([number], np.uint64)))
    segment = population.segments[owner]
    tensor = segment.tensor
    mask = np.array([segment.masks[slot]], np.uint64)
    return FaultPlan(
        (Target(tensor.name, tensor.dtype, tensor.shape),),
        np.zeros(1, np.int64),
        segment.flat(np.array([element], np.int64)),
        np.full(1, model.parsed_effect.op, np.uint8),
        mask,
        np.zeros(1, np.uint64) if model.parsed_effect.kind == "flip" else _value(model, mask),
        None,
        model.spec(),
        population.record(),
    )


def _value(model: FaultModel, mask: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[
    tuple[int], np.dtype[np.uint64]
]:  # fmt: skip
    """What set0 and set1 write."""
    return mask if model.parsed_effect.kind == "set1" else np.zeros_like(mask)
