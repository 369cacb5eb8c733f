"""Shards: where the elements of canonical tensors lie in this rank's live tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from flipper.training.parallel.grid import Grid

EVERYWHERE: Final = frozenset(("data", "model"))
"""The axes of the grid: every rank holds a copy."""


@dataclass(frozen=True)
class Shard:
    """A live tensor of this rank that holds a box of a canonical tensor; writing to it alters the run.

    tensor: a plain one, never a DTensor. shape: of the whole. starts: the box's first index on each axis.
    copied_over: the axes of the grid ("data", "model") along which other ranks hold copies of the same box.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    copied_over: frozenset[str]

    @property
    def box(self) -> tuple[slice, ...]:
        """The part of the whole that this is."""
        return tuple(slice(start, start + length) for start, length in zip(self.starts, self.tensor.shape, strict=True))

    def speaks_for(self, grid: Grid, replica: int = 0) -> bool:
        """Whether this rank is the first of those that hold the box in a replica."""
        return ("data" not in self.copied_over or grid.replica == replica) and (
            "model" not in self.copied_over or grid.part == 0
        )


def whole(tensor: Tensor, copied_over: frozenset[str] = EVERYWHERE) -> Shard:
    """A tensor that is in no parts."""
    return Shard(tensor, tuple(tensor.shape), (0,) * tensor.dim(), copied_over)


def shard_of(tensor: Tensor, grid: Grid) -> Shard:
    """What a parameter, buffer or optimizer tensor of this rank holds."""
    axes = {axis for axis, size in (("data", grid.parallel.data_size), ("model", grid.parallel.model_size)) if size > 1}
    if grid.parallel.pipelined:
        axes.discard("model")  # a stage is no other rank's
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Shard(tensor, tuple(tensor.shape), (0,) * tensor.dim(), frozenset(axes))
    _, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    names = tensor.device_mesh.mesh_dim_names or ()
    sharded = {name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate()}
    return Shard(local(tensor), tuple(tensor.shape), tuple(starts), frozenset(axes - sharded))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; writing to it alters the tensor."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
