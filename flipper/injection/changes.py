"""Changes: what a plan does to one checkpoint: the struck elements, and the bytes behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
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

Faults = tuple[Int, Ops, Bits, Bits]
"""Columns of faults in one tensor: flat, op, mask, value."""


@dataclass(frozen=True)
class Struck:
    """The struck elements of one tensor, by ascending flat index, each once.

    rows: where they stand in the columns. narrow: their flat indexes as they stand there. before: what they are; None
    for flips in plain bytes, which can be made without a look at them, and are read only where they are recorded.
    """

    tensor: Tensor
    rows: slice
    narrow: Any
    before: Bits | None

    @property
    def flat(self) -> Int:
        """Flat indexes, in 64 bits, so that places can be worked out from them."""
        return np.asarray(self.narrow, np.int64)


@dataclass(frozen=True)
class Columns:
    """The struck elements of all tensors, those of one after those of the other: columns of one length.

    op, mask, value: all faults in the element merged into one. offset: of the first byte, -1 where the element has no
    place of its own; file: index into the checkpoint's files. All are as narrow as they can be (by the size of the
    tensors, the width of the elements ...), since there may be tens of millions: widen them before reckoning.
    """

    flat: Int
    op: Ops
    mask: Bits
    value: Bits
    file: Int
    offset: Int

    def first(self, count: int) -> Columns:
        """The first `count` rows."""
        return Columns(*(getattr(self, each.name)[:count] for each in fields(self)))


@dataclass(frozen=True)
class Changes:
    """All that a plan does to a checkpoint.

    struck: by tensor name. columns: of them all. files: relative names. masks: relative name -> (offsets, XOR masks)
    of the struck elements' bytes, ascending and distinct. checksums: the same of the checksums that follow them.
    edits: relative name -> changes that the checkpoint has to rewrite itself.
    """

    struck: tuple[Struck, ...]
    columns: Columns
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
        where = np.searchsorted(offsets, more_offsets)
        return elements.combine(np.insert(offsets, where, more_offsets), np.insert(masks, where, more_masks))


def changes_of(checkpoint: Checkpoint, plan: FaultPlan, keep_checksums: bool = False) -> Changes:
    """What the plan does to this checkpoint; reads the elements that it has to know and nothing else.

    keep_checksums: leave the container's checksums as they are.
    Raises UsageError for a tensor that isn't there, MismatchError for one that the plan doesn't fit.
    """
    numbers = {file: index for index, file in enumerate(sorted(checkpoint.sources))}
    chosen = list(_by_tensor(checkpoint, plan))
    columns = _blank(len(plan), [tensor for tensor, _ in chosen], checkpoint)
    struck: list[Struck] = []
    pieces: dict[str, list[Masks]] = {}
    edits: dict[str, list[Edit]] = {}
    done = 0
    for tensor, rows in chosen:
        one, xor = _strike_tensor(checkpoint, tensor, _faults(tensor, plan, rows), columns, done)
        struck.append(one)
        done = one.rows.stop
        if tensor.place.patchable:
            for file, part in _located(one, xor, columns, numbers):
                pieces.setdefault(file, []).append(part)
        else:
            columns.file[one.rows], columns.offset[one.rows] = numbers[tensor.place.file], -1
            changed = np.flatnonzero(xor)
            edit = (tensor, one.flat[changed], xor[changed].astype(np.uint64))
            edits.setdefault(tensor.place.file, []).append(edit)
    masks = {file: elements.combine(*_joined(parts)) for file, parts in pieces.items()}
    checksums = {} if keep_checksums else {file: checkpoint.checksum_masks(file, *m) for file, m in masks.items()}
    return Changes(tuple(struck), columns.first(done), tuple(numbers), masks, checksums, edits)


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


def _blank(count: int, tensors: Sequence[Tensor], checkpoint: Checkpoint) -> Columns:
    """Columns for up to `count` elements; where these are zeros, nothing has to be written and no memory is taken."""
    flat = np.min_scalar_type(max((tensor.elements for tensor in tensors), default=0))
    word = f"u{max((tensor.layout.itemsize for tensor in tensors), default=1) or 1}"
    file = np.min_scalar_type(len(checkpoint.sources))
    placed = all(tensor.place.patchable for tensor in tensors)
    offset = np.min_scalar_type(max((s.size for s in checkpoint.sources.values()), default=0)) if placed else np.int64
    return Columns(*(np.zeros(count, kind) for kind in (flat, np.uint8, word, word, file, offset)))


def _faults(tensor: Tensor, plan: FaultPlan, rows: Any) -> Faults:
    """The faults in one tensor, in their order; raises MismatchError for one that it has no place for."""
    flat, mask, width = plan.flat[rows].astype(np.int64, copy=False), plan.mask[rows], tensor.layout.width
    if len(flat) and not 0 <= flat.min() <= flat.max() < tensor.elements:
        worst = flat.max() if flat.min() >= 0 else flat.min()
        raise MismatchError(f"{tensor.name} has {tensor.elements} elements; the plan strikes number {worst}")
    if width < 64 and len(mask) and int(mask.max()) >> width:
        raise MismatchError(f"{tensor.name} is {tensor.dtype}, {width} bits wide; the plan strikes bits beyond that")
    return flat, plan.op[rows], mask, plan.value[rows]


def _strike_tensor(
    checkpoint: Checkpoint, tensor: Tensor, faults: Faults, columns: Columns, start: int
) -> tuple[Struck, Bits]:
    """Put the faults in one tensor into the columns from row `start` on; returns the struck elements and their XOR."""
    flat, op, mask, value = merge(*faults)
    rows = slice(start, start + len(flat))
    columns.flat[rows], columns.mask[rows] = flat, mask
    writes = op.any()
    if writes:
        columns.op[rows], columns.value[rows] = op, value
    if tensor.place.patchable and not writes:
        before, xor = None, mask
    else:
        before = checkpoint.read_bits(tensor, flat)
        xor = before ^ strike(before, op, mask, value)
    return Struck(tensor, rows, columns.flat[rows], before), xor.astype(tensor.layout.word, copy=False)


def _located(struck: Struck, xor: Bits, columns: Columns, numbers: dict[str, int]) -> Iterator[tuple[str, Masks]]:
    """Each file that holds some of the elements, with their bytes that change; puts their places into the columns."""
    tensor = struck.tensor
    file, offset = columns.file[struck.rows], columns.offset[struck.rows]
    for part in tensor.place.locate(tensor.dims, tensor.layout, struck.flat):
        file[part.where], offset[part.where] = numbers[part.file], part.offsets
        yield part.file, elements.byte_masks(part.offsets, xor[part.where], tensor.layout, part.order, part.shifts)


def merge(flat: Int, op: Ops, mask: Bits, value: Bits) -> Faults:
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


def _merge_in_order(flat: Int, op: Ops, mask: Bits, value: Bits, starts: Int) -> Faults:
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
