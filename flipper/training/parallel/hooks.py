"""Data parallel by explicit allreduce: each gradient is summed over the replicas as soon as it is there (Horovod)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from flipper.training.allreduce import Allreduce
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.reduction import ordered_sum


class HookedParallel(nn.Module):
    """A replica whose gradients are summed one tensor at a time, from hooks on their accumulation.

    Buffers stay each replica's own, as they do under Horovod.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, native: bool) -> None:
        super().__init__()
        self.module = module
        self._group = group
        self._pending: list[dist.Work] = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = self._sum_natively if native else self._sum_in_order
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def finish(self) -> None:
        """Wait for the sums that are still under way, after the backward pass."""
        for work in self._pending:
            work.wait()
        self._pending.clear()

    def _sum_in_order(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(ordered_sum(parameter.grad, self._group))

    def _sum_natively(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._pending.append(dist.all_reduce(parameter.grad, group=self._group, async_op=True))


def wrap(module: nn.Module, grid: Grid, allreduce: Allreduce) -> HookedParallel:
    """The module with the hooks in place."""
    return HookedParallel(module, grid.replicas, allreduce.native)
