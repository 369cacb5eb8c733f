"""The parallel layouts, one module each, behind one small interface."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from flipper.errors import UsageError
from flipper.training.canonical import State
from flipper.training.launch import Place
from flipper.training.recipes.recipe import Recipe


@dataclass(frozen=True)
class StepResult:
    """What one step measured, the same on every rank: the batch's mean loss, the gradient's L2 norm, and
    the learning rate."""

    loss: float
    grad_norm: float
    lr: float


class Layout(Protocol):
    """One rank's part of a model under one strategy. Every method but `load` and `resident` is a collective."""

    def load(self, state: State) -> None:
        """Take this rank's part of a canonical state."""

    def step(self, features: Tensor, targets: Tensor) -> StepResult:
        """Train on one batch: the whole of it is given to every rank, which takes its own share."""

    def gather(self) -> State:
        """The canonical model and optimizer state, whole, on rank 0; empty elsewhere."""

    def resident(self) -> State:
        """What of model and optimizer on this very rank the next step depends on."""


def set_up(kind: str, recipe: Recipe, place: Place, device: torch.device) -> Layout:
    """This rank's part of the layout that flipper.training.parallel.<kind> holds."""
    module = importlib.import_module(f"{__name__}.{kind}")
    layout: Layout = module.set_up(recipe, place, device)
    return layout


def device_of(place: Place) -> torch.device:
    """The rank's own GPU, or the CPU; `auto` takes GPUs only if there is one for each rank."""
    count = torch.cuda.device_count() if place.device != "cpu" else 0
    if count >= place.world:
        torch.cuda.set_device(place.rank)
        return torch.device("cuda", place.rank)
    if place.device == "cuda":
        raise UsageError(f"{place.world} ranks need a GPU each; {count} found (--device cpu works anywhere)")
    return torch.device("cpu")


def squared_gradients(module: nn.Module, device: torch.device) -> Tensor:
    """The sum of the squares of a module's gradients, a float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in module.parameters():
        if parameter.grad is not None:
            total += parameter.grad.double().square().sum()
    return total


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Of the first parameter group."""
    return float(optimizer.param_groups[0]["lr"])
