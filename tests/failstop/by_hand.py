"""Data-parallel training of digits-mlp by hand, in one process and plain PyTorch, some workers dying in it: an oracle.

What it takes from flipper is the network, the data, the order of the samples and the initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flipper.training import Data, Recipe, recipes, seeds

BUCKETS = (("fc3.bias", "fc3.weight", "fc2.bias"), ("fc2.weight", "fc1.bias"), ("fc1.weight",))
"""Of digits-mlp, in the order in which they are averaged."""


@dataclass(frozen=True)
class Death:
    """A worker dies in step `step` (from 1), before bucket `bucket` is averaged, or before the step."""

    worker: int
    step: int
    bucket: int = 0


def trained(
    workers: int,
    steps: int,
    deaths: tuple[Death, ...] = (),
    recovery: str = "rollback",
    *,
    per_rank: bool = False,
    linear: bool = False,
    zero: bool = False,
    seed: int = 1,
) -> dict[str, Tensor]:
    """The parameters after so many steps."""
    recipe = recipes.get("digits-mlp")
    data = recipe.data(None)
    torch.manual_seed(seeds.derive(seed, "initial"))
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    named = dict(model.named_parameters())
    alive = list(range(workers))
    batches = len(data.train_targets) // recipe.batch_size
    for step in range(1, steps + 1):
        epoch, position = divmod(step - 1, batches)
        order = seeds.batch_order(seed, epoch, len(data.train_targets))
        batch = order[position * recipe.batch_size : (position + 1) * recipe.batch_size]

        def shares(
            alive: list[int] = alive, batch: Tensor = batch, alone: bool = per_rank
        ) -> dict[int, Tensor]:
            parts = batch.tensor_split(workers if alone else len(alive))
            return {worker: parts[worker if alone else place] for place, worker in enumerate(alive)}

        dying = [death for death in deaths if death.step == step]
        if dying and recovery == "rollback":
            alive = [worker for worker in alive if worker not in {death.worker for death in dying}]
            dying = []
        mine = shares(alive)
        total = sum(map(len, mine.values()))
        gradients = {worker: _gradients(recipe, model, data, part, total) for worker, part in mine.items()}
        for number, names in enumerate(BUCKETS):
            for death in dying:
                if death.bucket == number:
                    alive = [worker for worker in alive if worker != death.worker]
            left = sum(len(mine[worker]) for worker in alive)
            scale = 1.0 if zero else total / left
            for name in names:
                parts = [gradients[worker][name] for worker in alive]
                named[name].grad = _summed([part * scale if scale != 1 else part for part in parts])
        for group in optimizer.param_groups:
            group["lr_before"], group["lr"] = group["lr"], group["lr"] * (total / len(batch) if linear else 1)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = group.pop("lr_before")
    return {name: parameter.detach() for name, parameter in named.items()}


def _gradients(recipe: Recipe, model: nn.Module, data: Data, part: Tensor, total: int) -> dict[str, Tensor]:
    model.zero_grad()
    loss = recipe.loss(model(data.train_features[part]), data.train_targets[part])
    (loss * (len(part) / total) if len(part) != total else loss).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def _summed(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
