"""Tensor parallel: the weight matrices that a recipe's plan names are split over the ranks (DTensor)."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from flipper.errors import UsageError
from flipper.training.parallel.grid import Grid
from flipper.training.recipes.recipe import Recipe


def split(module: nn.Module, recipe: Recipe, grid: Grid) -> None:
    """Split the module in place by the recipe's plan; what the plan doesn't name, every rank holds whole.

    Raises UsageError: no plan, a name that isn't there, or an axis that the ranks don't divide.
    """
    layout, size = f"tensor:{grid.parallel.model_size}", grid.parallel.model_size
    if not recipe.tensor_plan:
        raise UsageError(f"{layout}: {recipe.name} has no tensor plan; run it under another layout")
    modules = dict(module.named_modules())
    if unknown := sorted(set(recipe.tensor_plan) - set(modules)):
        raise UsageError(f"{layout}: the tensor plan of {recipe.name} names {', '.join(unknown)}, which it lacks")
    shapes = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
    parallelize_module(module, grid.mesh["model"], dict(recipe.tensor_plan))
    for name, parameter in module.named_parameters():
        for placement in parameter.placements if isinstance(parameter, DTensor) else ():
            length = shapes[name][placement.dim] if isinstance(placement, Shard) else size
            if length % size:
                raise UsageError(f"{layout}: {name} has {length} slices, which {size} ranks don't divide evenly")
