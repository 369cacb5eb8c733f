"""Data parallel: every replica holds the model, and DistributedDataParallel sums the gradients bucket by bucket."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flipper.training.allreduce import Allreduce
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.reduction import sum_native, sum_ordered
from flipper.training.parallel.routed import program, sum_routed


def wrap(module: nn.Module, grid: Grid, allreduce: Allreduce) -> nn.Module:
    """The module wrapped so that gradients are summed over the replicas: each weighs its loss by its share."""
    replica = DistributedDataParallel(module, process_group=grid.replicas)
    if allreduce.mesh is not None:
        mine = program(allreduce.mesh.schedule(), grid.replica)
        replica.register_comm_hook((grid.replicas, mine), sum_routed)
    else:
        replica.register_comm_hook(grid.replicas, sum_native if allreduce.native else sum_ordered)
    return replica
