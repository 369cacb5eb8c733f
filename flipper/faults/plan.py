"""FaultPlan: the faults that were drawn, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from flipper.bits.layout import Bits
from flipper.checkpoints.elements import Int
from flipper.faults.effects import FLIP, OPS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Ops = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Fault:
    """One fault: `flip` XORs the mask into element `flat` of the tensor; `write` puts the value's bits where the mask
    has ones."""

    tensor: str
    flat: int
    op: str
    mask: int
    value: int | None

    @property
    def bits(self) -> tuple[int, ...]:
        """The positions of the mask's ones, ascending."""
        return tuple(position for position in range(64) if self.mask >> position & 1)


@dataclass(frozen=True)
class Stratum:
    """A part of the population that was drawn from by itself; probability: of one unit to be struck."""

    name: str
    bits: int
    probability: float
    faults: int

    def record(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        return {"name": self.name, "bits": self.bits, "probability": self.probability, "faults": self.faults}


@dataclass(frozen=True)
class Target:
    """A tensor that a plan strikes. dtype, shape: what it must have in the checkpoint; None when not known."""

    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class FaultPlan:
    """Faults as columns, all of one length, by tensor, then element, then bit.

    targets: the tensors struck; `target` (a whole-number type) indexes them. flat (int64): row-major element.
    op (uint8): FLIP or WRITE. mask, value (unsigned, as wide as the elements): see Fault; value is 0 for flips.
    seed, spec, population, strata: what it was drawn from; None and empty for a plan from a file.
    """

    targets: tuple[Target, ...]
    target: Int
    flat: Int
    op: Ops
    mask: Bits
    value: Bits
    seed: int | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    population: dict[str, Any] | None = None
    strata: tuple[Stratum, ...] = ()

    def __len__(self) -> int:
        return len(self.flat)

    def __eq__(self, other: object) -> bool:
        return equal_fields(self, other) if isinstance(other, FaultPlan) else NotImplemented

    def __iter__(self) -> Iterator[Fault]:
        columns = (column.tolist() for column in (self.target, self.flat, self.op, self.mask, self.value))
        for target, flat, op, mask, value in zip(*columns, strict=True):
            yield Fault(self.targets[target].name, flat, OPS[op], mask, None if op == FLIP else value)

    def by_target(self) -> Iterator[tuple[Target, slice]]:
        """Each struck tensor with the rows that strike it; the rows are ordered by tensor."""
        starts = np.searchsorted(self.target, np.arange(len(self.targets) + 1).astype(self.target.dtype))
        for index, target in enumerate(self.targets):
            if starts[index] < starts[index + 1]:
                yield target, slice(int(starts[index]), int(starts[index + 1]))


def equal_fields(one: DataclassInstance, other: DataclassInstance) -> bool:
    """Whether all fields of two objects of one dataclass are equal, columns of any width by their numbers."""
    pairs = ((getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def plan_of(targets: Sequence[Target], faults: Sequence[tuple[int, int, int, int, int]], **drawn: Any) -> FaultPlan:
    """A plan from rows (index of the target, flat, op, mask, value), put in order."""
    ordered = sorted(faults, key=lambda row: row[:2])
    columns = list(zip(*ordered, strict=True)) if ordered else [()] * 5
    kinds = (np.int64, np.int64, np.uint8, np.uint64, np.uint64)
    target, flat, op, mask, value = (np.array(column, kind) for column, kind in zip(columns, kinds, strict=True))
    return FaultPlan(tuple(targets), target, flat, op, mask, value, **drawn)
