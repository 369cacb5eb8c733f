"""A recipe trained by a plain PyTorch loop: what its first losses are, without flipper's own loop and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flipper.training.recipes.recipe import Recipe


def first_losses(recipe: Recipe, steps: int, folder: Path | None = None) -> list[float]:
    """The losses of the first steps, on samples in an order drawn once for all."""
    with torch.random.fork_rng(), one_thread():
        torch.manual_seed(0)
        model = recipe.model()
        data = recipe.data(folder)
        optimizer = recipe.optimizer(model.parameters())
        schedule = recipe.schedule(optimizer) if recipe.schedule else None
        order = torch.randperm(len(data.train_targets))
        losses = []
        for step in range(steps):
            batch = order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
            optimizer.zero_grad()
            loss = recipe.loss(model(data.train_features[batch]), data.train_targets[batch])
            loss.backward()
            optimizer.step()
            if schedule:
                schedule.step()
            losses.append(loss.item())
    return losses


@contextmanager
def one_thread() -> Iterator[None]:
    """Tests run beside each other: more threads than cores make small sums slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parameter_count(recipe: Recipe) -> int:
    return sum(parameter.numel() for parameter in recipe.model().parameters())
