"""Fully sharded data parallel: parameters, gradients and optimizer state lie in shards over the ranks (FSDP2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from flipper.errors import UsageError
from flipper.training.allreduce import Allreduce
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.reduction import sum_of_slices
from flipper.training.ties import parameters_of, sharing


class OrderedReduceScatter:
    """FSDP2's reduce-scatter with the sum in rank order."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        del op, async_op  # always a sum (see shard), and done on return
        output_tensor.copy_(sum_of_slices(input_tensor, group))


def wrap(module: nn.Module, grid: Grid, allreduce: Allreduce) -> nn.Module:
    """Shard the module in place over the ranks that share the batch: each child a group, the root what is left.

    Losses are weighed by each rank's share of the batch, so gradients are summed and never divided.
    Raises UsageError for parameters that FSDP can't shard.
    """
    for name, parameter in parameters_of(module).items():
        if not parameter.dim() or not parameter.numel():
            what = "no elements" if parameter.dim() else "no axis to shard"
            raise UsageError(f"{grid.parallel}: {name} has {what}; run the recipe under another layout")
    mesh = grid.mesh["data"]
    for child in _uniform(module, sharing(module)):
        fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
            if not allreduce.native:
                each.set_custom_reduce_scatter(OrderedReduceScatter())  # type: ignore[arg-type]  # its base is private
    return module


def unsharded(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the passes compute with, by canonical name; outside FSDP the module's own. A collective.

    FSDP's are whole, and the same objects from step to step, though they have memory only while they are used: what
    is hooked to them sees a rank's own gradients. The module may be any; its own parameters are shards again on return.
    """
    sharded = [each for each in module.modules() if isinstance(each, FSDPModule)]
    for each in sharded:
        each.unshard()
    whole = parameters_of(module)
    for each in sharded:
        each.reshard()
    return whole


def _uniform(module: nn.Module, tied: set[nn.Module]) -> list[nn.Module]:
    """The largest modules below this one whose parameters are all of one dtype, which FSDP needs to group them.

    tied: modules that share parameters with others, and are left to the group of the root, as one parameter is to be.
    """
    found: list[nn.Module] = []
    for child in module.children():
        dtypes = {parameter.dtype for parameter in child.parameters()}
        if len(dtypes) == 1 and child not in tied:
            found.append(child)
        elif dtypes:
            found += _uniform(child, tied)
    return found
