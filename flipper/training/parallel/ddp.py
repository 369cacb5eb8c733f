"""Data parallel: every rank holds the model and trains on its share of the batch (DistributedDataParallel)."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from flipper.errors import UsageError
from flipper.training import canonical
from flipper.training.canonical import State
from flipper.training.launch import Place
from flipper.training.parallel import StepResult, learning_rate, squared_gradients
from flipper.training.recipes.recipe import Recipe


class DataParallel:
    """DDP whose gradients are summed in rank order, so that no sum depends on how DDP fills its buckets."""

    def __init__(self, recipe: Recipe, place: Place, device: torch.device) -> None:
        if place.world > recipe.batch_size:
            raise UsageError(f"ddp:{place.world}: {recipe.name} has only {recipe.batch_size} samples a batch")
        self._recipe = recipe
        self._place = place
        self._device = device
        self._model = recipe.model().to(device)
        self._optimizer = recipe.optimizer(self._model.parameters())
        self._replica = DistributedDataParallel(self._model)
        self._replica.register_comm_hook(None, _sum_hook)

    def load(self, state: State) -> None:
        """After the wrap, whose broadcast would undo what differs between ranks."""
        canonical.restore(self._model, self._optimizer, state)

    def step(self, features: Tensor, targets: Tensor) -> StepResult:
        """Shares may differ by a sample, so each rank's mean loss counts by its share of the batch."""
        mine = features.tensor_split(self._place.world)[self._place.rank].to(self._device)
        wanted = targets.tensor_split(self._place.world)[self._place.rank].to(self._device)
        self._optimizer.zero_grad()
        loss = self._recipe.loss(self._replica(mine), wanted) * (len(wanted) / len(targets))
        torch.autograd.backward(loss)
        norm = squared_gradients(self._model, self._device).sqrt()
        self._optimizer.step()
        return StepResult(ordered_sum(loss.detach()).item(), norm.item(), learning_rate(self._optimizer))

    def gather(self) -> State:
        return {} if self._place.rank else canonical.collect(self._model, self._optimizer)

    def resident(self) -> State:
        """Without the buffers but on rank 0: the next forward pass overwrites them with rank 0's."""
        state = canonical.collect(self._model, self._optimizer)
        if self._place.rank:
            for name, _ in self._model.named_buffers():
                state.pop(f"model.{name}", None)
        return state


def ordered_sum(tensor: Tensor) -> Tensor:
    """The elementwise sum of every rank's tensor of any one shape, added in rank order, on every rank.

    Each rank sums one slice for all: all_to_all, sum, all_gather. An element's sum depends only on the
    ranks' values, never on where it lies in the buffer, as it does with gloo's and nccl's own allreduce.
    """
    world = dist.get_world_size()
    flat = tensor.reshape(-1)
    width = -(-flat.numel() // world)
    padded = torch.nn.functional.pad(flat, (0, width * world - flat.numel()))
    slices = torch.empty_like(padded)
    dist.all_to_all_single(slices, padded)
    total, *others = slices.view(world, width).unbind()
    total = total.clone()
    for other in others:
        total += other
    result = torch.empty_like(padded)
    dist.all_gather(list(result.view(world, width).unbind()), total)
    return result[: flat.numel()].view(tensor.shape)


def _sum_hook(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(ordered_sum(bucket.buffer()))
    return future


def set_up(recipe: Recipe, place: Place, device: torch.device) -> DataParallel:
    """The layout on this rank."""
    return DataParallel(recipe, place, device)
