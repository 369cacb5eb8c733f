"""Whole: a model that runs as one module, on one rank, as a replica of many, or in shards that act as one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flipper.errors import UsageError
from flipper.training.parallel.hooks import HookedParallel
from flipper.training.recipes.parts import loss_of
from flipper.training.recipes.recipe import Recipe


class Whole:
    """Forward and backward through the module, or through what it is wrapped in."""

    def __init__(self, recipe: Recipe, module: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.module = module
        self._replica = wrap(module)
        self._recipe = recipe

    def backward(self, features: Tensor, targets: Tensor, weight: float) -> Tensor:
        """The gradients of weight x the mean loss, summed over the replicas; returns this replica's own such loss."""
        loss = loss_of(self._recipe, self._forward(features), targets)
        if weight != 1:
            loss = loss * weight
        torch.autograd.backward(loss)
        if isinstance(self._replica, HookedParallel):
            self._replica.finish()
        return loss.detach()

    def _forward(self, features: Tensor) -> Tensor:
        try:
            output: Tensor = self._replica(features)
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            raise UsageError(
                f"some of {self._recipe.name}'s parameters got no gradient in the last step, which "
                "DistributedDataParallel refuses: leave them out of the model, or run it under hooks:N"
            ) from error
        return output
