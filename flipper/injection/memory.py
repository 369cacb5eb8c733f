"""memory: the same plan on live torch tensors; the only module of this package that imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from flipper import bits
from flipper.checkpoints.elements import Int
from flipper.errors import MismatchError, UsageError
from flipper.faults import effects
from flipper.faults.plan import FaultPlan, Target
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
    spellings = {spelling: name for name in tensors for spelling in reversed(short_names(name))}
    chosen = [(_find(tensors, spellings, target), rows) for target, rows in plan.by_target()]
    changes = [_change(tensor, name, plan, rows) for (name, tensor), rows in chosen]
    for words, index, after in changes:
        words[index] = after
    return sum(len(after) for _, _, after in changes)


def _find(
    tensors: Mapping[str, torch.Tensor], spellings: Mapping[str, str], target: Target
) -> tuple[str, torch.Tensor]:
    name = target.name if target.name in tensors else None
    name = name or next((spellings[short] for short in short_names(target.name) if short in spellings), None)
    if name is None:
        raise UsageError(f"there is no live tensor {target.name}; there are {', '.join(list(tensors)[:5])}, ...")
    tensor = tensors[name]
    dtype, shape = _described(tensor)
    if target.dtype is not None and target.dtype != dtype:
        raise MismatchError(f"{name} is {dtype} here and {target.dtype} in the plan")
    if target.shape is not None and target.shape != shape:
        raise MismatchError(f"{name} has the shape {list(shape)} here and {list(target.shape)} in the plan")
    return name, tensor


def _described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """dtype and shape as checkpoints name them."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if dtype in PACKED:
        return PACKED[dtype], (*shape[:-1], 2 * shape[-1])
    return dtype, shape


Change = tuple["torch.Tensor", "tuple[torch.Tensor, ...]", "torch.Tensor"]
"""A view of the tensor as integers, the indexes that change, and what will stand there."""


def _change(tensor: torch.Tensor, name: str, plan: FaultPlan, rows: slice) -> Change:
    import torch

    dtype, shape = _described(tensor)
    layout = bits.layout(dtype)
    flat, mask, value = plan.flat[rows], plan.mask[rows], plan.value[rows]
    words = torch.view_as_real(tensor.detach()) if layout.components == 2 else tensor.detach()
    dims = shape + ((2,) if layout.components == 2 else ())
    if len(flat) and not 0 <= flat.min() <= flat.max() < np.prod(dims, dtype=np.int64):
        raise MismatchError(f"{name} has {int(np.prod(dims))} elements; the plan strikes number {int(flat.max())}")
    if layout.width < 64 and np.any(mask >> np.uint64(layout.width)):
        raise MismatchError(f"{name} is {dtype}, {layout.width} bits wide; the plan strikes bits beyond that")
    if layout.packed:
        shift = (flat % 2 * layout.width).astype(np.uint64)
        flat, mask, value = flat // 2, mask << shift, value << shift
    words = words.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[layout.itemsize or 1])
    flat, op, mask, value = merge(flat, plan.op[rows], mask, value)
    index = tuple(torch.from_numpy(i.copy()).to(words.device) for i in _unravel(flat, tuple(words.shape)))
    before = words[index].cpu().numpy().reshape(len(flat))
    unsigned = before.view(f"u{before.itemsize}").astype(np.uint64)
    after = effects.strike(unsigned, op, mask, value).astype(f"u{before.itemsize}").view(before.dtype)
    return words, index, torch.from_numpy(after).to(words.device).reshape(words[index].shape)


def _unravel(flat: Int, shape: tuple[int, ...]) -> tuple[Int, ...]:
    return tuple(np.unravel_index(flat, shape)) if shape else ()
