"""A user's own recipe: NAME at the top level of FILE.py, written FILE.py:NAME."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from flipper.errors import FlipperError, RecipeError, UsageError

if TYPE_CHECKING:
    from flipper.training.recipes.recipe import Recipe

_PREFIX: Final = "flipper_recipe_"
"""What the names of users' modules begin with."""


def is_meant(name: str) -> bool:
    """Whether a recipe's name is of this kind, right or wrong."""
    return ":" in name or name.endswith(".py")


def split(name: str) -> tuple[Path, str]:
    """The file and the name in it; UsageError: there is no such file, or one of the two is missing."""
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py") or not attribute.isidentifier():
        raise UsageError(f"recipe {name!r}: write FILE.py:NAME, where NAME is a Recipe at the top level of FILE.py")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"recipe {name!r}: no file {file}")
    return path, attribute


def load(name: str) -> Recipe:
    """The recipe, from its file run anew; RecipeError: the file raises, or has no Recipe of that name."""
    from flipper.training.recipes.recipe import Recipe

    path, attribute = split(name)
    found = vars(_run(path))
    names = [each for each, value in found.items() if isinstance(value, Recipe)]
    have = f"its Recipes: {', '.join(names)}" if names else "it has no Recipe at its top level"
    if attribute not in found:
        raise RecipeError(f"no {attribute} in {path}; {have}")
    recipe = found[attribute]
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{attribute} in {path} is of type {type(recipe).__name__}, not a Recipe; {have}")
    return recipe


def _run(path: Path) -> ModuleType:
    """The file as a module. Modules beside it can be imported, though none shadows an installed one."""
    name = f"{_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{path} can't be loaded: {_one_line(error, path)}") from error
    return module


def _one_line(error: BaseException, path: Path) -> str:
    """What was raised, and on which line of the file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path.absolute())]
    where = f" (line {lines[-1]})" if lines else ""
    kind = "" if isinstance(error, FlipperError) else f"{type(error).__name__}: "
    return f"{kind}{str(error).partition(chr(10))[0][:300]}{where}"


def place(error: BaseException) -> str | None:
    """The file and line of a user's recipe at which an error came up, the innermost; None when it came up elsewhere."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).startswith(_PREFIX):
            found = f"{Path(frame.f_code.co_filename).name}, line {line}"
    return found
