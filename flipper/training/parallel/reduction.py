"""Sums over ranks in rank order: the same bits wherever a value lies in its buffer."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket


def ordered_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The elementwise sum of every rank's tensor of any one shape, added in rank order, on every rank.

    Each rank sums one slice for all: all_to_all, sum, all_gather. An element's sum depends only on the
    ranks' values, never on where it lies in the buffer, as it does with gloo's and nccl's own allreduce.
    """
    world = dist.get_world_size(group)
    padded = padded_for(tensor, world)
    result = torch.empty_like(padded)
    dist.all_gather(list(result.view(world, -1).unbind()), sum_of_slices(padded, group), group)
    return result[: tensor.numel()].view(tensor.shape)


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
    return _done(ordered_sum(bucket.buffer(), group))


def sum_native(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook that sums a bucket as the backend does."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed


def _done(tensor: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
