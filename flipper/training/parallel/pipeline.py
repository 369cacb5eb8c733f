"""Pipeline parallel: every rank holds one stage of the model and micro-batches flow through (GPipe or 1F1B)."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from flipper.errors import UsageError
from flipper.training.parallel.grid import Grid
from flipper.training.recipes.parts import loss_of
from flipper.training.recipes.recipe import Recipe

# Fixed, not derived from the stages: BatchNorm sees micro-batches, so their size is part of the mathematics.
MICRO_BATCHES: Final = 4

SCHEDULES: Final = {"pipeline": ScheduleGPipe, "pipeline-1f1b": Schedule1F1B}

Wrap = Callable[[nn.Module], nn.Module]


class Pipeline:
    """One stage: a run of the model's children, under their own names."""

    def __init__(self, recipe: Recipe, model: nn.Module, grid: Grid, wrap: Wrap, sample: Tensor) -> None:
        parallel = grid.parallel
        if recipe.batch_size % (parallel.data_size * MICRO_BATCHES):
            raise UsageError(
                f"{parallel}: {recipe.name}'s batch of {recipe.batch_size} is no multiple of "
                f"{parallel.data_size} x {MICRO_BATCHES} micro-batches"
            )
        stages = cut(recipe, model, parallel.model_size, str(parallel))
        self.module: nn.Module = stages[grid.part].to(grid.device)
        micro = recipe.batch_size // parallel.data_size // MICRO_BATCHES
        arrives, leaves = _boundaries(stages, sample[:micro])[grid.part]
        self._first, self._last = grid.part == 0, grid.part == parallel.model_size - 1
        self._weight = 1.0
        self._recipe = recipe
        stage = PipelineStage(
            wrap(self.module), grid.part, parallel.model_size, grid.device,
            input_args=(arrives,), output_args=(leaves,), group=grid.parts,
        )  # fmt: skip
        kind = SCHEDULES[parallel.model or ""]
        self._schedule = kind(stage, MICRO_BATCHES, loss_fn=self._weighted)

    def backward(self, features: Tensor, targets: Tensor, weight: float) -> Tensor | None:
        """The gradients of weight x the mean loss; returns that loss on the last stage, None on the others."""
        self._weight = weight
        losses: list[Tensor] = []
        inputs = (features,) if self._first else ()
        if not self._last:
            self._schedule.step(*inputs)
            return None
        self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).double().mean()

    def _weighted(self, output: Tensor, target: Tensor) -> Tensor:
        loss = loss_of(self._recipe, output, target)
        return loss if self._weight == 1 else loss * self._weight


def cut(recipe: Recipe, model: nn.Module, count: int, layout: str) -> list[nn.Sequential]:
    """The recipe's model in `count` stages, cut at the recipe's cuts, as evenly over them as goes."""
    pieces = len(recipe.cuts) + 1
    if count > 1 and not isinstance(model, nn.Sequential):
        raise UsageError(f"{layout}: {recipe.name}'s model is a {type(model).__name__}; only an nn.Sequential is cut")
    if count > pieces:
        places = f" (cut before {', '.join(recipe.cuts)})" if recipe.cuts else ""
        raise UsageError(f"{layout}: {recipe.name} has at most {pieces} stage{'s' * (pieces > 1)}{places}")
    if count == 1:
        return [nn.Sequential(OrderedDict(model.named_children()))]
    starts = {recipe.cuts[stage * pieces // count - 1] for stage in range(1, count)}
    stages: list[OrderedDict[str, nn.Module]] = [OrderedDict()]
    for name, child in model.named_children():
        if name in starts:
            stages.append(OrderedDict())
        stages[-1][name] = child
    found = [nn.Sequential(stage) for stage in stages]
    for stage in found:
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            names = ", ".join(name for name, _ in stage.named_children())
            raise UsageError(f"{layout}: {recipe.name} has no parameters to train in its stage of {names}")
        stage.register_forward_hook(_sendable)
    return found


def _sendable(stage: nn.Module, arrived: object, leaves: object) -> Tensor:
    """What a stage hands on, in a form that can be sent."""
    if not isinstance(leaves, Tensor):
        names = ", ".join(name for name, _ in stage.named_children())
        raise UsageError(f"the stage of {names} hands on a {type(leaves).__name__}; a pipeline sends single tensors")
    return leaves.contiguous()


def _boundaries(stages: list[nn.Sequential], sample: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What enters and leaves each stage, as meta tensors of one micro-batch.

    Computed on copies, without data where that goes: PipelineStage's own inference would run the real stage, and move
    BatchNorm's running statistics before training has begun.
    """
    try:
        flow = _flow(stages, sample, "meta")
    except RuntimeError:  # a module looks at numbers, as BatchNorm does whose momentum is None
        flow = [each.detach().to("meta").requires_grad_(each.requires_grad) for each in _flow(stages, sample, "cpu")]
    return list(itertools.pairwise(flow))


def _flow(stages: list[nn.Sequential], sample: Tensor, device: str) -> list[Tensor]:
    flow = [sample.to(device)]
    for stage in stages:
        flow.append(copy.deepcopy(stage).to(device)(flow[-1]).detach().requires_grad_())
    return flow
