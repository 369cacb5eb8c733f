"""The parallel layouts: how a model and its batch are shared by ranks; PyTorch's own engines, one module each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flipper.errors import UsageError
from flipper.training.allreduce import ORDERED, Allreduce
from flipper.training.layouts import Parallel
from flipper.training.parallel import ddp, fsdp, hooks, tensor
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.layout import Engine, Layout, StepResult
from flipper.training.parallel.pipeline import Pipeline
from flipper.training.parallel.whole import Whole
from flipper.training.ranks import Place
from flipper.training.recipes.parts import model_of
from flipper.training.recipes.recipe import Recipe
from flipper.training.ties import check_kept, ties_of

__all__ = ["Layout", "SetUp", "StepResult", "device_of", "set_up"]

SetUp = Callable[[Parallel, Recipe, Place, Tensor, Allreduce], Layout]
"""What makes a rank's part of a layout; see set_up."""

_WRAPS = {"ddp": ddp.wrap, "hooks": hooks.wrap, "fsdp": fsdp.wrap}


def set_up(
    parallel: Parallel, recipe: Recipe, place: Place, sample: Tensor, allreduce: Allreduce = ORDERED
) -> Layout:
    """This rank's part of a layout; a collective.

    sample: a batch of features, for their shape. allreduce: how gradients are summed. Raises
    UsageError where the recipe doesn't fit.
    """
    if parallel.data_size > recipe.batch_size:
        raise UsageError(f"{parallel}: {recipe.name} has only {recipe.batch_size} samples a batch")
    grid = Grid.of(parallel, place, device_of(place))

    def wrap(module: nn.Module) -> nn.Module:
        return _WRAPS[parallel.data](module, grid, allreduce) if parallel.data else module

    engine: Engine
    model = model_of(recipe)
    ties = ties_of(model)
    if parallel.pipelined:
        engine = Pipeline(recipe, model, grid, wrap, sample)
    else:
        module = model.to(grid.device)
        if parallel.model == "tensor":
            tensor.split(module, recipe, grid)
        engine = Whole(recipe, module, wrap)
    check_kept(engine.module, ties, str(parallel), recipe.name)
    return Layout(grid, recipe, engine, ties)


def device_of(place: Place) -> torch.device:
    """The rank's own GPU, or the CPU; `auto` takes GPUs only if there is one for each rank of this host."""
    count = torch.cuda.device_count() if place.device != "cpu" else 0
    if count >= place.local_world:
        torch.cuda.set_device(place.local_rank)
        return torch.device("cuda", place.local_rank)
    if place.device == "cuda":
        who = f"{place.local_world} ranks need a GPU each" if place.local_world > 1 else "one rank needs a GPU"
        raise UsageError(f"{who}; {count} found (--device cpu works anywhere)")
    return torch.device("cpu")
