"""Training under a parallel layout: recipes, layouts, the loop, the canonical state, and its checkpoints.

The launching side (spec, launch, ranks, run, control) never imports torch; the ranks do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from flipper.training.recipes.recipe import Data, Recipe, accuracy

__all__ = ["Data", "Recipe", "accuracy"]

# What a user's own recipe is made of; imported at first use, since torch comes with it.
_HOME: Final = "flipper.training.recipes.recipe"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'flipper.training' has no attribute {name!r}")
    return getattr(import_module(_HOME), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
