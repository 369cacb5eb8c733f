"""One rank that holds everything."""

from __future__ import annotations

import torch
from torch import Tensor

from flipper.training import canonical
from flipper.training.canonical import State
from flipper.training.launch import Place
from flipper.training.parallel import StepResult, learning_rate, squared_gradients
from flipper.training.recipes.recipe import Recipe


class Single:
    """Plain training, the yardstick of the other layouts."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._recipe = recipe
        self._device = device
        self._model = recipe.model().to(device)
        self._optimizer = recipe.optimizer(self._model.parameters())

    def load(self, state: State) -> None:
        canonical.restore(self._model, self._optimizer, state)

    def step(self, features: Tensor, targets: Tensor) -> StepResult:
        self._optimizer.zero_grad()
        loss = self._recipe.loss(self._model(features.to(self._device)), targets.to(self._device))
        torch.autograd.backward(loss)
        norm = squared_gradients(self._model, self._device).sqrt()
        self._optimizer.step()
        return StepResult(loss.item(), norm.item(), learning_rate(self._optimizer))

    def gather(self) -> State:
        return canonical.collect(self._model, self._optimizer)

    def resident(self) -> State:
        return canonical.collect(self._model, self._optimizer)


def set_up(recipe: Recipe, place: Place, device: torch.device) -> Single:
    """The layout on its only rank."""
    del place
    return Single(recipe, device)
