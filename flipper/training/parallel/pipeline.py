"""Model parallel: every rank holds one stage of the model; micro-batches flow through (GPipe)."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from flipper.errors import UsageError
from flipper.training import canonical
from flipper.training.canonical import State
from flipper.training.launch import Place
from flipper.training.parallel import StepResult, learning_rate, squared_gradients
from flipper.training.recipes.recipe import Recipe

# Fixed, not derived from the stages: BatchNorm sees micro-batches, so their size is part of the mathematics.
MICRO_BATCHES: Final = 4


class Pipeline:
    """One stage: a run of the model's children, under their own names, with its own optimizer."""

    def __init__(self, recipe: Recipe, place: Place, device: torch.device) -> None:
        if recipe.batch_size % MICRO_BATCHES:
            raise UsageError(f"{recipe.name}'s batch of {recipe.batch_size} is no multiple of {MICRO_BATCHES}")
        self._place = place
        self._device = device
        stages = cut(recipe, place.world)
        self._module = stages[place.rank].to(device)
        self._optimizer = recipe.optimizer(self._module.parameters())
        arrives, leaves = _boundaries(stages, recipe)[place.rank]
        stage = PipelineStage(
            self._module, place.rank, place.world, device, input_args=(arrives,), output_args=(leaves,)
        )
        self._schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=recipe.loss)

    def load(self, state: State) -> None:
        canonical.restore(self._module, self._optimizer, state)

    def step(self, features: Tensor, targets: Tensor) -> StepResult:
        """The loss is known on the last stage; a gather of both figures tells everyone."""
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = (features.to(self._device),) if self._place.rank == 0 else ()
        if self._place.rank == self._place.world - 1:
            self._schedule.step(*inputs, target=targets.to(self._device), losses=losses, return_outputs=False)
        else:
            self._schedule.step(*inputs)
        mine = torch.zeros(2, dtype=torch.float64, device=self._device)
        mine[0] = squared_gradients(self._module, self._device)
        if losses:
            mine[1] = torch.stack(losses).double().mean()
        everyone = [torch.empty_like(mine) for _ in range(self._place.world)]
        dist.all_gather(everyone, mine)
        self._optimizer.step()
        squares = sum(part[0].item() for part in everyone)
        return StepResult(everyone[-1][1].item(), squares**0.5, learning_rate(self._optimizer))

    def gather(self) -> State:
        parts: list[State] = [{} for _ in range(self._place.world)]
        dist.gather_object(self.resident(), parts if self._place.rank == 0 else None)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def resident(self) -> State:
        return canonical.collect(self._module, self._optimizer)


def cut(recipe: Recipe, count: int) -> list[nn.Sequential]:
    """A fresh model in `count` stages, cut at the recipe's cuts, as evenly over them as goes."""
    pieces = len(recipe.cuts) + 1
    if count > pieces:
        places = ", ".join(recipe.cuts)
        raise UsageError(f"pipeline:{count}: {recipe.name} has at most {pieces} stages (cut before {places})")
    starts = {recipe.cuts[stage * pieces // count - 1] for stage in range(1, count)}
    stages: list[OrderedDict[str, nn.Module]] = [OrderedDict()]
    for name, child in recipe.model().named_children():
        if name in starts:
            stages.append(OrderedDict())
        stages[-1][name] = child
    return [nn.Sequential(stage) for stage in stages]


def _boundaries(stages: list[nn.Sequential], recipe: Recipe) -> list[tuple[Tensor, Tensor]]:
    """What enters and leaves each stage, as meta tensors of one micro-batch.

    Computed on copies without data: PipelineStage's own inference would run the real stage, and move
    BatchNorm's running statistics before training has begun.
    """
    sample = recipe.data(None).train_features[: recipe.batch_size // MICRO_BATCHES].to("meta")
    flow = [sample]
    for stage in stages:
        flow.append(copy.deepcopy(stage).to("meta")(flow[-1]).detach().requires_grad_())
    return list(itertools.pairwise(flow))


def set_up(recipe: Recipe, place: Place, device: torch.device) -> Pipeline:
    """The layout on this rank."""
    return Pipeline(recipe, place, device)
