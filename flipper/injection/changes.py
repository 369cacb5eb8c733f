"""Changes: what a plan does to one checkpoint: struck elements before and after, and the bytes behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flipper.bits.layout import Bits
from flipper.checkpoints import elements
from flipper.checkpoints.checkpoint import Checkpoint, Edit
from flipper.checkpoints.elements import Bytes, Int
from flipper.checkpoints.tensor import Tensor
from flipper.errors import MismatchError, UsageError
from flipper.faults.effects import FLIP, WRITE, strike
from flipper.faults.plan import FaultPlan, Ops, Target

Masks = tuple[Int, Bytes]
"""Offsets in a file, ascending and distinct, and what each byte there is XORed with."""


@dataclass(frozen=True)
class Struck:
    """The struck elements of one tensor, by ascending flat index, each once.

    op, mask, value: all faults in the element merged into one. mask, value, before, after: no wider than the element,
    since there may be tens of millions. offset: of its first byte, -1 where it has no place
    of its own; file: index into `files`, whose entries are relative names.
    """

    tensor: Tensor
    flat: Int
    op: Ops
    mask: Bits
    value: Bits
    before: Bits
    after: Bits
    file: Int
    offset: Int


@dataclass(frozen=True)
class Changes:
    """All that a plan does to a checkpoint.

    struck: by tensor name. files: relative names. masks: relative name -> (offsets, XOR masks) of the struck elements'
    bytes, ascending and distinct. checksums: the same of the checksums that follow them.
    edits: relative name -> changes that the checkpoint has to rewrite itself.
    """

    struck: tuple[Struck, ...]
    files: tuple[str, ...]
    masks: dict[str, Masks]
    checksums: dict[str, Masks]
    edits: dict[str, list[Edit]]

    @property
    def struck_files(self) -> list[str]:
        """The files that change, by relative name."""
        return sorted(set(self.masks) | set(self.edits))

    def file_masks(self, file: str) -> Masks:
        """All bytes of a file to XOR, those of checksums too."""
        none = (np.zeros(0, np.int64), np.zeros(0, np.uint8))
        (offsets, masks), (more_offsets, more_masks) = self.masks.get(file, none), self.checksums.get(file, none)
        if len(more_offsets) == 0:
            return offsets, masks
        return elements.combine(np.concatenate((offsets, more_offsets)), np.concatenate((masks, more_masks)))


def changes_of(checkpoint: Checkpoint, plan: FaultPlan, keep_checksums: bool = False) -> Changes:
    """What the plan does to this checkpoint; reads the struck elements and nothing else.

    keep_checksums: leave the container's checksums as they are.
    Raises UsageError for a tensor that isn't there, MismatchError for one that the plan doesn't fit.
    """
    files = tuple(sorted(checkpoint.sources))
    numbers = {file: index for index, file in enumerate(files)}
    struck = []
    pieces: dict[str, list[Masks]] = {}
    edits: dict[str, list[Edit]] = {}
    for tensor, rows in _by_tensor(checkpoint, plan):
        one = _strike_tensor(checkpoint, tensor, plan, rows, numbers)
        struck.append(one)
        xor = one.before ^ one.after
        if not tensor.place.patchable:
            changed = np.flatnonzero(xor)
            edit = (tensor, one.flat[changed], xor[changed].astype(np.uint64))
            edits.setdefault(tensor.place.file, []).append(edit)
            continue
        for part in tensor.place.locate(tensor.dims, tensor.layout, one.flat):
            struck_bytes = elements.byte_masks(part.offsets, xor[part.where], tensor.layout, part.order, part.shifts)
            pieces.setdefault(part.file, []).append(struck_bytes)
    masks = {file: elements.combine(*_joined(parts)) for file, parts in pieces.items()}
    checksums = {} if keep_checksums else {file: checkpoint.checksum_masks(file, *m) for file, m in masks.items()}
    return Changes(tuple(struck), files, masks, checksums, edits)


def _joined(parts: list[Masks]) -> Masks:
    """All parts as one, in the order of the file, so that they need no sorting where tensors don't interleave."""
    parts.sort(key=lambda part: int(part[0][0]) if len(part[0]) else -1)
    offsets, masks = (np.concatenate(column) for column in zip(*parts, strict=True))
    return offsets, masks


def _by_tensor(checkpoint: Checkpoint, plan: FaultPlan) -> Iterator[tuple[Tensor, Any]]:
    """Each tensor with the rows that strike it, under whichever of its names."""
    rows: dict[str, list[Any]] = {}
    for target, part in plan.by_target():
        tensor = checkpoint.tensor(target.name)
        _check(tensor, target)
        rows.setdefault(tensor.name, []).append(part)
    for name in sorted(rows):
        parts = rows[name]
        together = parts[0] if len(parts) == 1 else np.concatenate([np.arange(p.start, p.stop) for p in parts])
        yield checkpoint.tensor(name), together


def _check(tensor: Tensor, target: Target) -> None:
    if not tensor.supported:
        raise MismatchError(f"{tensor.name} can't be struck: {tensor.place.reason}")
    if target.dtype is not None and target.dtype != tensor.dtype:
        raise MismatchError(f"{tensor.name} is {tensor.dtype} here and {target.dtype} in the plan")
    if target.shape is not None and target.shape != tensor.shape:
        here, there = list(tensor.shape), list(target.shape)
        raise MismatchError(f"{tensor.name} has the shape {here} here and {there} in the plan")


def _strike_tensor(
    checkpoint: Checkpoint, tensor: Tensor, plan: FaultPlan, rows: Any, numbers: dict[str, int]
) -> Struck:
    columns = (plan.flat[rows], plan.op[rows], plan.mask[rows], plan.value[rows])
    width = tensor.layout.width
    if len(columns[0]) and not 0 <= columns[0].min() <= columns[0].max() < tensor.elements:
        worst = columns[0].max() if columns[0].min() >= 0 else columns[0].min()
        raise MismatchError(f"{tensor.name} has {tensor.elements} elements; the plan strikes number {worst}")
    if width < 64 and np.any(columns[2] >> np.uint64(width)):
        raise MismatchError(f"{tensor.name} is {tensor.dtype}, {width} bits wide; the plan strikes bits beyond that")
    flat, op, mask, value = merge(*columns)
    before = checkpoint.read_bits(tensor, flat)
    after = strike(before, op, mask, value)
    file, offset = np.zeros(len(flat), np.min_scalar_type(len(numbers))), np.full(len(flat), -1, np.int64)
    if tensor.place.patchable:
        for part in tensor.place.locate(tensor.dims, tensor.layout, flat):
            file[part.where], offset[part.where] = numbers[part.file], part.offsets
    else:
        file[:] = numbers[tensor.place.file]
    words = {"mask": mask, "value": value, "before": before, "after": after}
    narrow: dict[str, Any] = {name: column.astype(tensor.layout.word) for name, column in words.items()}
    return Struck(tensor, flat, op, file=file, offset=offset, **narrow)


def merge(flat: Int, op: Ops, mask: Bits, value: Bits) -> tuple[Int, Ops, Bits, Bits]:
    """Faults in the same element as one: by ascending flat index, each once, with the effect of all in their order."""
    if np.all(flat[1:] > flat[:-1]):
        return flat, op, mask, value
    if np.any(flat[1:] < flat[:-1]):
        rank = np.argsort(flat, kind="stable")
        flat, op, mask, value = flat[rank], op[rank], mask[rank], value[rank]
    starts = np.flatnonzero(np.concatenate(([True], flat[1:] != flat[:-1])))
    if len(starts) == len(flat):
        return flat, op, mask, value
    if np.all(op == FLIP):
        return flat[starts], op[starts], np.bitwise_xor.reduceat(mask, starts), value[starts]
    return _merge_in_order(flat, op, mask, value, starts)


def _merge_in_order(flat: Int, op: Ops, mask: Bits, value: Bits, starts: Int) -> tuple[Int, Ops, Bits, Bits]:
    """Flips and writes mixed: a later write replaces an earlier one, a flip after a write turns what was written."""
    ends = np.append(starts[1:], len(flat))
    longest = int((ends - starts).max())
    written, held, turned = (np.zeros(len(starts), np.uint64) for _ in range(3))
    for step in range(longest):
        rows = np.flatnonzero(starts + step < ends)
        at = starts[rows] + step
        writes = op[at] == WRITE
        here, bits = rows[writes], at[writes]
        written[here] |= mask[bits]
        held[here] = (held[here] & ~mask[bits]) | (value[bits] & mask[bits])
        turned[here] &= ~mask[bits]
        here, bits = rows[~writes], at[~writes]
        held[here] ^= mask[bits] & written[here]
        turned[here] ^= mask[bits] & ~written[here]
    mixed = (written != 0) & (turned != 0)
    if mixed.any():
        where = int(flat[starts[np.flatnonzero(mixed)[0]]])
        raise UsageError(f"element {where} is both flipped and written, in different bits; make it one kind")
    return flat[starts], np.where(written != 0, WRITE, FLIP).astype(np.uint8), written | turned, held
