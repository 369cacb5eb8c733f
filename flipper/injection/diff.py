"""diff: the elements in which two checkpoints differ, whatever their formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flipper.bits.layout import BitLayout, Bits
from flipper.checkpoints import Checkpoint, Tensor
from flipper.checkpoints.checkpoint import BLOCK_ELEMENTS
from flipper.checkpoints.elements import Int

COLUMNS = (
    "tensor", "flat", "index", "dtype", "before", "after", "xor", "bits", "fields", "before_value", "after_value",
    "kind",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Elements of one tensor that differ: flat indexes ascending, and their bits in both checkpoints."""

    tensor: Tensor
    flat: Int
    before: Bits
    after: Bits


@dataclass(frozen=True)
class Unmatched:
    """A tensor without a partner to compare it with. kind: only-in-a, only-in-b, dtype, shape or unsupported."""

    kind: str
    tensor: str
    before: str | None
    after: str | None

    def row(self) -> dict[str, Any]:
        """As `flipper diff` prints it."""
        return {"tensor": self.tensor, "before": self.before, "after": self.after, "kind": self.kind}


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[Difference | Unmatched]:
    """What differs, tensor by tensor in name order; streamed, NaNs compared by their bits."""
    mine, theirs = _by_name(a), _by_name(b)
    seen: set[tuple[str, str]] = set()
    for name in sorted(mine.keys() | theirs.keys()):
        left, right = mine.get(name), theirs.get(name)
        if left is None or right is None:
            yield _unmatched("only-in-a" if right is None else "only-in-b", name, left, right)
        elif (left.name, right.name) not in seen:  # ties are compared once
            seen.add((left.name, right.name))
            yield from _compare(a, b, left, right)


def rows(found: Difference) -> Iterator[dict[str, Any]]:
    """One row a differing element."""
    layout = found.tensor.layout
    digits = (layout.width + 3) // 4
    for first in range(0, len(found.flat), 4096):
        part = slice(first, first + 4096)
        values = layout.decode(found.before[part]).tolist(), layout.decode(found.after[part]).tolist()
        columns = (found.flat[part].tolist(), found.before[part].tolist(), found.after[part].tolist(), *values)
        for flat, before, after, old, new in zip(*columns, strict=True):
            positions = [position for position in range(layout.width) if (before ^ after) >> position & 1]
            yield {
                "tensor": found.tensor.name,
                "flat": flat,
                "index": [int(i) for i in np.unravel_index(flat, found.tensor.dims)] if found.tensor.dims else [],
                "dtype": found.tensor.dtype,
                "before": f"0x{before:0{digits}x}",
                "after": f"0x{after:0{digits}x}",
                "xor": f"0x{before ^ after:0{digits}x}",
                "bits": positions,
                "fields": _fields(layout, positions),
                "before_value": old,
                "after_value": new,
            }


class Summary:
    """Counts of differing elements and bits by tensor, and of bits by position and field."""

    def __init__(self) -> None:
        self.elements: Counter[str] = Counter()
        self.bits: Counter[str] = Counter()
        self.positions: Counter[int] = Counter()
        self.fields: Counter[str] = Counter()
        self.unmatched: list[Unmatched] = []

    def add(self, found: Difference | Unmatched) -> None:
        """Count one result of `differences`."""
        if isinstance(found, Unmatched):
            self.unmatched.append(found)
            return
        self.elements[found.tensor.name] += len(found.flat)
        xor, layout = found.before ^ found.after, found.tensor.layout
        for position in range(layout.width):
            count = int(np.count_nonzero(xor >> np.uint64(position) & np.uint64(1)))
            if count:
                self.bits[found.tensor.name] += count
                self.positions[position] += count
                self.fields[layout.field_of(position)] += count

    def record(self) -> dict[str, Any]:
        """As `flipper diff --summary` prints it."""
        counts = sorted(self.elements.items())
        tensors = [{"tensor": name, "elements": count, "bits": self.bits[name]} for name, count in counts]
        return {
            "equal": not self.elements and not self.unmatched,
            "elements": sum(self.elements.values()),
            "bits": sum(self.bits.values()),
            "tensors": tensors,
            "positions": {str(position): count for position, count in sorted(self.positions.items())},
            "fields": dict(sorted(self.fields.items())),
            "unmatched": [found.row() for found in self.unmatched],
        }


def _fields(layout: BitLayout, positions: list[int]) -> list[str]:
    return list(dict.fromkeys(layout.field_of(position) for position in reversed(positions)))


def _by_name(checkpoint: Checkpoint) -> dict[str, Tensor]:
    # From the last to the first: of tensors that share a name, the one that can be read comes first.
    return {name: tensor for tensor in reversed(checkpoint.tensors) for name in tensor.names}


def _unmatched(kind: str, name: str, left: Tensor | None, right: Tensor | None) -> Unmatched:
    return Unmatched(kind, name, *(None if tensor is None else _shown(tensor) for tensor in (left, right)))


def _shown(tensor: Tensor) -> str:
    if not tensor.supported:
        return f"unsupported: {tensor.place.reason}"
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"


def _compare(a: Checkpoint, b: Checkpoint, left: Tensor, right: Tensor) -> Iterator[Difference | Unmatched]:
    if not left.supported and not right.supported:
        return
    if left.supported != right.supported:
        yield _unmatched("unsupported", left.name, left, right)
    elif left.dtype != right.dtype:
        yield _unmatched("dtype", left.name, left, right)
    elif left.shape != right.shape:
        yield _unmatched("shape", left.name, left, right)
    else:
        first = 0
        for one, other in zip(a.blocks(left), b.blocks(right), strict=True):
            places = np.flatnonzero(one != other)
            if len(places):
                yield Difference(left, places + first, one[places], other[places])
            first += BLOCK_ELEMENTS
