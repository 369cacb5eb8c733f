"""memory: the same plan on live torch tensors; the only module of this package that imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flipper import bits
from flipper.bits.layout import Bits
from flipper.checkpoints.elements import Int
from flipper.errors import MismatchError, UsageError
from flipper.faults import effects
from flipper.faults.plan import FaultPlan, Ops, Target
from flipper.faults.selection import short_names
from flipper.injection.changes import merge

if TYPE_CHECKING:
    import torch

PACKED = {"float4_e2m1fn_x2": "float4_e2m1fn"}
"""torch's dtypes of two elements a byte -> what they are called element by element."""


def strike(tensors: Mapping[str, torch.Tensor], plan: FaultPlan) -> int:
    """Make the faults of a plan in live tensors, on any device, in place; returns how many elements were struck.

    tensors: by name, such as module.state_dict(), whose tensors share memory with the module. Leading model., module.
    or state_dict. may differ between these names and the plan's.
    Raises UsageError for a tensor that isn't there, MismatchError for a dtype, shape or element that doesn't fit; then
    nothing was struck.
    """
    if not isinstance(tensors, Mapping):
        raise UsageError(f"{type(tensors).__name__} maps no names to tensors; a module's state_dict() does")
    spellings = {spelling: name for name in tensors for spelling in reversed(short_names(name))}
    chosen = [(_find(tensors, spellings, target), rows) for target, rows in plan.by_target()]
    changes = [change for (name, tensor), rows in chosen for change in _changes(tensor, name, plan, rows)]
    for change in changes:  # one after the other, as two names may lead to the same memory
        change.make()
    return sum(len(change.op) for change in changes)


def _find(
    tensors: Mapping[str, torch.Tensor], spellings: Mapping[str, str], target: Target
) -> tuple[str, torch.Tensor]:
    name = target.name if target.name in tensors else None
    name = name or next((spellings[short] for short in short_names(target.name) if short in spellings), None)
    if name is None:
        there = ", ".join(map(str, list(tensors)[:5])) + (", ..." if len(tensors) > 5 else "")
        raise UsageError(f"there is no live tensor {target.name}; there are {there or 'none at all'}")
    tensor = tensors[name]
    if not _is_tensor(tensor):
        raise UsageError(f"{name} is of type {type(tensor).__name__} here; the plan strikes a torch tensor")
    dtype, shape = _described(tensor)
    if target.dtype is not None and target.dtype != dtype:
        raise MismatchError(f"{name} is {dtype} here and {target.dtype} in the plan")
    if target.shape is not None and target.shape != shape:
        raise MismatchError(f"{name} has the shape {list(shape)} here and {list(target.shape)} in the plan")
    return name, tensor


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """dtype and shape as checkpoints name them."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if dtype in PACKED:
        return PACKED[dtype], (*shape[:-1], 2 * shape[-1])
    return dtype, shape


@dataclass(frozen=True)
class _Change:
    """words: a view of the tensor as integers. index: those that change, each once. op, mask, value: how."""

    words: torch.Tensor
    index: tuple[torch.Tensor, ...]
    op: Ops
    mask: Bits
    value: Bits

    def make(self) -> None:
        """Read the words, change them, write them back."""
        import torch

        held = self.words[self.index]
        before = held.cpu().numpy().reshape(len(self.op))
        unsigned = before.view(f"u{before.itemsize}").astype(np.uint64)
        after = effects.strike(unsigned, self.op, self.mask, self.value).astype(f"u{before.itemsize}")
        self.words[self.index] = torch.from_numpy(after.view(before.dtype)).to(held.device).reshape(held.shape)


def _changes(tensor: torch.Tensor, name: str, plan: FaultPlan, rows: slice) -> Iterator[_Change]:
    """The changes that the rows of a plan make in one tensor; of a packed one, one for each place in a byte."""
    import torch

    if (obstacle := _obstacle(tensor)) is not None:
        raise MismatchError(f"{name} can't be struck: {obstacle}")
    dtype, shape = _described(tensor)
    layout = bits.layout(dtype)
    _check_rows(name, dtype, shape, plan, rows)
    words = torch.view_as_real(tensor.detach()) if layout.components == 2 else tensor.detach()
    words = words.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[layout.itemsize or 1])
    once = words[tuple(slice(None) if stride else slice(0, 1) for stride in words.stride())]
    in_a_byte = 8 // layout.width if layout.packed else 1
    for place in range(in_a_byte):
        part = np.flatnonzero(plan.flat[rows] % in_a_byte == place) + rows.start
        if len(part):
            places = _held_once(plan.flat[part] // in_a_byte, words.shape, once.shape)
            flat, op, mask, value = merge(places, plan.op[part], plan.mask[part], plan.value[part])
            index = tuple(torch.from_numpy(i.copy()).to(words.device) for i in _unravel(flat, once.shape))
            shift = np.uint64(place * layout.width if layout.packed else 0)
            yield _Change(once, index, op, mask << shift, value << shift)


def _obstacle(tensor: torch.Tensor) -> str | None:
    """Why the memory of a tensor can't be struck; None if it can."""
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized:
        return "it is sparse or quantised; strike the plain tensors that it is made of"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a lazy conjugate or negative of other memory; resolve_conj() and resolve_neg() make it plain"
    if tensor.is_meta:
        return "it is on the meta device and holds nothing"
    if hasattr(tensor, "to_local"):
        return "it is a DTensor; strike its to_local() by a plan for that shard"
    return None


def _check_rows(name: str, dtype: str, shape: tuple[int, ...], plan: FaultPlan, rows: slice) -> None:
    layout = bits.layout(dtype)
    count = math.prod(shape) * layout.components
    flat, mask = plan.flat[rows], plan.mask[rows]
    if len(flat) and not 0 <= flat.min() <= flat.max() < count:
        worst = flat.max() if flat.min() >= 0 else flat.min()
        raise MismatchError(f"{name} has {count} elements; the plan strikes number {int(worst)}")
    if layout.width < 64 and np.any(mask >> np.uint64(layout.width)):
        raise MismatchError(f"{name} is {dtype}, {layout.width} bits wide; the plan strikes bits beyond that")


def _held_once(flat: Int, shape: tuple[int, ...], once: tuple[int, ...]) -> Int:
    """Where elements lie when the axes along which a tensor is expanded, so that it repeats itself, are cut to 1."""
    if tuple(once) == tuple(shape):
        return flat
    index = [np.minimum(i, size - 1) for i, size in zip(np.unravel_index(flat, shape), once, strict=True)]
    return np.ravel_multi_index(tuple(index), once)


def _unravel(flat: Int, shape: tuple[int, ...]) -> tuple[Int, ...]:
    return tuple(np.unravel_index(flat, shape)) if shape else ()
