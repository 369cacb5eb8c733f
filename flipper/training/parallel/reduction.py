"""Sums over ranks in rank order: the same bits wherever a value lies in its buffer."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

AT_ONCE: Final = 256 << 10
"""Bytes up to which every rank sends its whole vector to every other: twice the bytes and half the waiting."""


def ordered_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The elementwise sum of every rank's tensor of any one shape, added in rank order, on every rank.

    Each rank sums one slice for all and hands it round; of a small tensor each sums all for itself. An element's sum
    depends only on the ranks' values, never on where it lies in the buffer, as it does with gloo's and nccl's own
    allreduce.
    """
    total = OrderedSum(tensor, group)
    total.gather()
    return total.result()


class OrderedSum:
    """ordered_sum in three parts, between which a rank may do other things: begun when made, then `gather`, `result`.

    Of several sums under way at once, all ranks do the parts in one and the same order.
    """

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        self._shape, self._group, self._world = tensor.shape, group, dist.get_world_size(group)
        self._at_once = self._world == 2 or tensor.nbytes <= AT_ONCE
        flat = tensor.reshape(-1)
        self._exchange(flat.repeat(self._world) if self._at_once else padded_for(tensor, self._world))

    def gather(self) -> None:
        """Wait for everyone's part of this rank's slice, and hand round its sum."""
        if not self._at_once:
            self._work.wait()
            # Gloo's all_gather goes round the ranks one by one.
            self._exchange(added(self._received, self._world).repeat(self._world))

    def result(self) -> Tensor:
        """Wait for everyone's sums; a tensor of the shape of this rank's."""
        self._work.wait()
        whole = added(self._received, self._world) if self._at_once else self._received[: self._shape.numel()]
        return whole.view(self._shape)

    def _exchange(self, parts: Tensor) -> None:
        self._sent, self._received = parts, torch.empty_like(parts)
        self._work = dist.all_to_all_single(self._received, parts, group=self._group, async_op=True)


def sum_of_slices(flat: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's slice of the sum of every rank's flat tensor, added in rank order (a reduce-scatter)."""
    world = dist.get_world_size(group)
    slices = torch.empty_like(flat)
    dist.all_to_all_single(slices, flat, group=group)
    return added(slices, world)


def padded_for(tensor: Tensor, world: int) -> Tensor:
    """The tensor as a vector, with zeros behind it so that it parts into as many equal slices as there are ranks."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % world))


def added(slices: Tensor, world: int) -> Tensor:
    """The sum of the slices that came from each rank, in rank order."""
    total, *others = slices.view(world, -1).unbind()
    total = total.clone()
    for other in others:
        total += other
    return total


def sum_ordered(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook that sums a bucket in rank order."""
    return done(ordered_sum(bucket.buffer(), group))


def sum_native(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook that sums a bucket as the backend does."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed


def done(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """A future that holds the tensor already."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
