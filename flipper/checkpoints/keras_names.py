"""Keras 3 weights: the model's own names for its layers, which the file stores by type and number.

`layers/dense_1/vars/0` is the second Dense layer's first weight, whatever the layer is called: a layer called `dense`
may well lie in `layers/dense_1`. The model's name stands in an attribute of the group `vars` (newer Keras), and in
the config.json of a .keras file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flipper.checkpoints.tensor import Tensor

MAX_DEPTH = 50
"""Models inside models."""

Names = Mapping[tuple[str, ...], str]
"""Path of a layer's group -> the model's name for the layer."""


def with_layer_names(tensors: Iterable[Tensor], names: Names) -> tuple[Tensor, ...]:
    """The tensors with the model's names as further aliases: fc/vars/0 for layers/dense/vars/0.

    They stay behind the names that are in the file, whatever the code points, and one that is taken is left out.
    """
    known = tuple(tensors)
    if not names:
        return known
    taken = {name for tensor in known for name in tensor.names}
    renamed = []
    for tensor in known:
        alias = _in_model(tensor.name.split("/"), names)
        if alias not in taken:
            taken.add(alias)
            tensor = replace(tensor, aliases=(*tensor.aliases, alias))
        renamed.append(tensor)
    return tuple(renamed)


def note(names: Names, stored_by_type: bool) -> tuple[str, ...]:
    """What the user should hear: which layer is which, or that the file doesn't say."""
    if not stored_by_type:
        return ()
    if not names:
        return ("Keras stored the layers by type and number, without their names: layers/dense_1 is the second Dense",)
    pairs = [f"{'/'.join(path)} is {name}" for path, name in sorted(names.items()) if path[-1] != name]
    if not pairs:
        return ()
    shown = ", ".join(pairs[:8]) + (f" and {len(pairs) - 8} more" if len(pairs) > 8 else "")
    return (f"Keras stored the layers by type and number; the model's own names are aliases: {shown}",)


def is_layer(path: Sequence[str]) -> bool:
    """Whether a group is that of a layer in a model or in a model inside it."""
    return len(path) >= 2 and path[0] == "layers" and path[-2] == "layers"


def names_in_config(config: Any) -> dict[tuple[str, ...], str]:
    """The names of all layers that the parsed config.json of a Functional or Sequential model gives."""
    names: dict[tuple[str, ...], str] = {}
    _collect(config, (), names)
    return names


def _collect(model: Any, path: tuple[str, ...], names: dict[tuple[str, ...], str]) -> None:
    """Number the layers by type as Keras does when it saves: dense, dense_1, dense_2."""
    content = model.get("config") if isinstance(model, dict) else None
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list) or len(path) > 2 * MAX_DEPTH:
        return
    used: dict[str, int] = {}
    for layer in layers:
        kind, inner = (layer.get("class_name"), layer.get("config")) if isinstance(layer, dict) else (None, None)
        name = inner.get("name") if isinstance(inner, dict) else None
        if not isinstance(kind, str) or not isinstance(name, str):
            continue
        number = used.get(kind, 0)
        used[kind] = number + 1
        here = (*path, "layers", _snake(kind) + (f"_{number}" if number else ""))
        names[here] = name
        _collect(layer, here, names)


def _snake(kind: str) -> str:
    """BatchNormalization -> batch_normalization, Conv2DTranspose -> conv2d_transpose."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", kind).lower()


def _in_model(path: Sequence[str], names: Names) -> str:
    """A path with the model's names for the layers on it, without the folders `layers` that hold them."""
    parts: list[str] = []
    for end in range(1, len(path) + 1):
        name = names.get(tuple(path[:end]))
        if name is not None and is_layer(path[:end]):
            parts[-1] = name
        else:
            parts.append(path[end - 1])
    return "/".join(parts)
