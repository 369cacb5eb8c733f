"""Ties: several names over the same bytes become one tensor under the first name by code point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from flipper.checkpoints.roles import role_of
from flipper.checkpoints.tensor import Tensor, Unsupported, run_of


def settle(tensors: Iterable[Tensor], recorded: Mapping[str, str] | None = None) -> tuple[Tensor, ...]:
    """The tensors sorted by name, tied ones merged, roles set; a name that occurs twice is kept but unsupported.

    recorded: alias -> name of a tensor, ties that the container writes down (safetensors' metadata).
    """
    groups: dict[object, list[str]] = {}
    first: dict[object, Tensor] = {}
    seen: set[str] = set()
    clashes: list[Tensor] = []
    for tensor in tensors:
        if tensor.name in seen:
            reason = f"another tensor is called {tensor.name} too"
            clashes.append(replace(tensor, place=Unsupported(tensor.place.file, reason)))
            continue
        seen.add(tensor.name)
        key = _identity(tensor)
        groups.setdefault(key, []).append(tensor.name)
        first.setdefault(key, tensor)
    keys = {name: key for key, names in groups.items() for name in names}
    for alias, name in (recorded or {}).items():
        if name in keys and alias not in seen:
            groups[keys[name]].append(alias)
            seen.add(alias)
    merged = [_merge(first[key], sorted(names)) for key, names in groups.items()]
    return tuple(sorted(merged + clashes, key=lambda tensor: tensor.name))


def _identity(tensor: Tensor) -> object:
    """What tied tensors have in common; something unique for a tensor that can't be tied."""
    pieces = getattr(tensor.place, "pieces", None)
    if pieces and tensor.elements:
        return (pieces, tensor.dtype, tensor.shape)
    run = run_of(tensor.place)
    if run is not None and tensor.elements:
        space, extent = run
        return (space, extent.start, extent.order, extent.strides, tensor.dtype, tensor.shape)
    return tensor.name


def _merge(tensor: Tensor, names: list[str]) -> Tensor:
    return Tensor(names[0], tensor.dtype, tensor.shape, tensor.place, role_of(names[0]), tuple(names[1:]))
