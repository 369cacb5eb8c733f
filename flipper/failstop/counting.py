"""Counts the buckets of a recipe's model, in a process of its own that may import torch."""

from __future__ import annotations

import functools
from typing import Any

from flipper.training.ranks import Emit, Place


@functools.lru_cache(maxsize=16)
def bucket_count(recipe: str) -> int:
    """How many buckets the gradients of a recipe's model are averaged in, by ranks that survive a death."""
    from flipper.training.launch import run_ranks

    told: list[dict[str, Any]] = []
    run_ranks(functools.partial(_tell, recipe), 1, told.append, device="cpu")
    return int(told[0]["buckets"])


def _tell(recipe: str, place: Place, emit: Emit) -> None:
    from flipper.failstop.buckets import bucketed
    from flipper.training import recipes, seeds
    from flipper.training.recipes.parts import model_of

    seeds.seed_recipe()
    emit({"event": "buckets", "buckets": len(bucketed(model_of(recipes.get(recipe)).parameters()))})
