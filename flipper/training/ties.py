"""Ties: parameters and buffers that a model has under several names; the canonical one is the first by code point."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from flipper.errors import UsageError


def names_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and every buffer of a module once, by its canonical name, in the module's order."""
    return {min(names): tensor for tensor, names in _named(module)}


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters alone."""
    return {name: tensor for name, tensor in names_of(module).items() if isinstance(tensor, nn.Parameter)}


def ties_of(module: nn.Module) -> dict[str, str]:
    """Further name -> canonical name, of what is saved with the module."""
    saved = module.state_dict().keys()
    return {name: min(names) for _, names in _named(module) for name in names if name != min(names) and name in saved}


def check_kept(module: nn.Module, ties: dict[str, str], layout: str, recipe: str) -> None:
    """Raise UsageError when a layout has parted what a model has tied: the copies would go their own ways.

    module: this rank's part of the model, under its names.
    """
    here = {name: id(tensor) for tensor, names in _named(module) for name in names}
    for name, first in ties.items():
        if here.get(name) != here.get(first):
            raise UsageError(f"{layout} parts {first} and {name}, which {recipe} ties; run it under another layout")


def sharing(root: nn.Module) -> set[nn.Module]:
    """The modules in a root that share a parameter with one outside them."""
    names = {id(tensor): len(found) for tensor, found in _named(root)}
    return {
        module
        for module in root.modules()
        if any(len(found) < names[id(tensor)] for tensor, found in _named(module) if isinstance(tensor, nn.Parameter))
    }


def _named(module: nn.Module) -> Iterable[tuple[Tensor, list[str]]]:
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return found.values()
