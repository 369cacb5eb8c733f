"""Replicas: whether the ranks that should hold equal parameters do, and by how much they differ."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flipper.training.canonical import tensor_bytes
from flipper.training.parallel.layout import Layout


@dataclass(frozen=True)
class Comparison:
    """equal: to the bit. max_abs_difference: over all parameters, infinite where one is NaN and the other isn't.

    rank: the first that differs from the first replica's, None when none does.
    """

    equal: bool
    max_abs_difference: float
    rank: int | None


def compare_replicas(layout: Layout) -> Comparison:
    """Compare every replica's parameters with the first one's, by digest; a collective.

    Only when digests differ are the parameters themselves sent round.
    """
    grid = layout.grid
    mine = hashlib.sha256()
    parameters = [parameter.detach() for _, parameter in layout.module.named_parameters()]
    for parameter in parameters:
        mine.update(tensor_bytes(parameter))
    digests = grid.everyone(mine.digest())
    differing = [rank for rank in range(grid.world) if digests[rank] != digests[rank % grid.parallel.model_size]]
    if not differing:
        return Comparison(True, 0.0, None)
    largest = torch.zeros((), dtype=torch.float64, device=grid.device)
    for parameter in parameters:
        theirs = parameter.clone()
        dist.broadcast(theirs, src=grid.part, group=grid.replicas)
        gap = (theirs.double() - parameter.double()).abs()
        gap[theirs == parameter] = 0  # infinities of one sign have no gap
        gap[theirs.isnan() & parameter.isnan()] = 0
        if gap.numel():
            largest = torch.maximum(largest, gap.nan_to_num(nan=math.inf).max())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return Comparison(False, float(largest), differing[0])
