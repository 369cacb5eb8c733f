"""What a recipe's functions return, checked: a user's mistake is named, not met later in torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flipper.errors import UsageError, shortened
from flipper.training.recipes.recipe import Data, Recipe


def model_of(recipe: Recipe) -> nn.Module:
    """A fresh model with something to train in it; UsageError else."""
    model = recipe.model()
    if not isinstance(model, nn.Module):
        raise _wrong(recipe, "model", model, "an nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"{recipe.name}: its model has no parameters to train")
    later = [name for name, _ in model.named_children()][1:]
    if list(recipe.cuts) != [name for name in later if name in recipe.cuts]:
        raise UsageError(
            f"{recipe.name}: its cuts, {', '.join(recipe.cuts)}, are not some of its model's children after the first, "
            f"in their order: {shortened(', '.join(later))}"
        )
    return model


def data_of(recipe: Recipe, folder: Path | None) -> Data:
    """The samples; UsageError when it is something else, or less than a batch."""
    data = recipe.data(folder)
    if not isinstance(data, Data):
        raise _wrong(recipe, "data", data, "a flipper.training.Data")
    if len(data.train_targets) < recipe.batch_size:
        raise UsageError(
            f"{recipe.name} trains on {recipe.batch_size} samples a step; its data has {len(data.train_targets)}"
        )
    return data


def optimizer_of(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of these parameters whose step takes nothing; UsageError else."""
    optimizer = recipe.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _wrong(recipe, "optimizer", optimizer, "a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(f"{recipe.name}: LBFGS takes several passes a step; flipper trains with one")
    return optimizer


def schedule_of(recipe: Recipe, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The learning rate's schedule, if there is one; UsageError for one that steps by the loss."""
    schedule = None if recipe.schedule is None else recipe.schedule(optimizer)
    if isinstance(schedule, ReduceLROnPlateau):
        raise UsageError(f"{recipe.name}: ReduceLROnPlateau steps by the loss; flipper's schedules step by themselves")
    if schedule is not None and not isinstance(schedule, LRScheduler):
        raise _wrong(recipe, "schedule", schedule, "one of torch's learning-rate schedulers")
    return schedule


def loss_of(recipe: Recipe, output: Tensor, target: Tensor) -> Tensor:
    """The loss to go backward from; UsageError when it is none: not a single number, or cut off from the model."""
    loss = recipe.loss(output, target)
    if not isinstance(loss, Tensor):
        raise _wrong(recipe, "loss", loss, "a tensor")
    if loss.numel() != 1:
        raise UsageError(f"{recipe.name}: its loss returns {list(loss.shape)} numbers; take their mean")
    if not loss.requires_grad:
        raise UsageError(f"{recipe.name}: its loss has no gradient: was it detached, or computed without the output?")
    return loss


def scores_of(recipe: Recipe, output: Tensor, target: Tensor) -> tuple[float, float]:
    """Loss and accuracy as plain numbers, for an evaluation; UsageError when one is no number."""
    found = []
    for function in ("loss", "accuracy"):
        value = getattr(recipe, function)(output, target)
        try:
            found.append(float(value.detach() if isinstance(value, Tensor) else value))
        except (TypeError, ValueError, RuntimeError) as error:
            raise _wrong(recipe, function, value, "a single number") from error
    return found[0], found[1]


def _wrong(recipe: Recipe, function: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"{recipe.name}: its {function} returns an object of type {type(value).__name__}, not {wanted}")
