"""The index of an HDF5 file: every dataset as a tensor, with the place of its bytes; no data is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flipper import bits
from flipper.checkpoints import hdf5_layout as own
from flipper.checkpoints import hdf5_walk
from flipper.checkpoints.hdf5_attributes import shape_attribute, text_attribute
from flipper.checkpoints.hdf5_place import Opener, Places
from flipper.checkpoints.hdf5_types import ElementType, element_type
from flipper.checkpoints.keras_names import is_layer
from flipper.checkpoints.source import Source
from flipper.checkpoints.tensor import Tensor, Unsupported
from flipper.checkpoints.tree import Leaf, Tree
from flipper.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class Index:
    """What a file holds.

    tensors: one a dataset, and unsupported rows for links that lead elsewhere. aliases: other paths -> first path.
    tree: groups as dicts, or the structure that flipper recorded. notes: what the user should hear.
    keras: whether Keras 3 stored layers by type and number here. layer_names: group of a layer -> the model's name for
    it, as far as the file says.
    """

    tensors: list[Tensor]
    aliases: dict[str, str]
    tree: Callable[[], Tree]
    notes: tuple[str, ...]
    keras: bool
    layer_names: dict[tuple[str, ...], str]


class Indexer:
    """Indexes one HDF5 file.

    source: its bytes. opened: opens it as an h5py.File. userblock: bytes in front of the HDF5 content.
    """

    def __init__(self, source: Source, opened: Opener, userblock: int) -> None:
        self.source = source
        self.opened = opened
        self.userblock = userblock
        self.places = Places(source, opened, userblock)
        self.own_layout = False

    def index(self) -> Index:
        """Read the whole index."""
        with self.opened() as file:
            self.own_layout = self._text(file, own.MARK_ATTRIBUTE) == own.MARK
            recorded = self.own_layout and own.TREE_DATASET in file
            found = hdf5_walk.walk(file.id)
            tensors, aliases = self._tensors(file, found)
            layer_names = self._layer_names(file, found.groups)
        for path, target in found.elsewhere.items():
            tensors.append(Tensor(self._name(path), "link", (0,), Unsupported("", target)))
        names = [(path, self._name(path)) for paths in found.datasets.values() for path in paths]
        tree = self._recorded_tree if recorded else lambda: self._tree(found, names)
        by_type = any(len(path) == 3 and path[0] == b"layers" and path[2] == b"vars" for path in found.groups)
        return Index(tensors, aliases, tree, tuple(self.places.notes), by_type, layer_names)

    def _tree(self, found: hdf5_walk.Found, names: list[tuple[hdf5_walk.Path, str]]) -> Tree:
        if self.own_layout:
            return {name: Leaf(name) for _, name in sorted(names)}
        return _nested(found.groups, names)

    def _tensors(self, file: Any, found: hdf5_walk.Found) -> tuple[list[Tensor], dict[str, str]]:
        from h5py import h5d

        tensors, aliases = [], {}
        for paths in found.datasets.values():
            if self.own_layout and (own.TREE_DATASET.encode(),) in paths:
                continue
            name, *others = sorted(self._name(path) for path in paths)
            aliases.update(dict.fromkeys(others, name))
            path = b"/".join(paths[0])
            tensors.append(self._tensor(name, path, h5d.open(file.id, path)))
        return tensors, aliases

    def _name(self, path: hdf5_walk.Path) -> str:
        name = _text(b"/".join(path))
        return own.name_of(name) if self.own_layout else name

    def _tensor(self, name: str, path: bytes, dataset: Any) -> Tensor:
        shape = dataset.shape
        if shape is None:
            kind = element_type(dataset.get_type())
            return Tensor(name, kind.dtype, (0,), Unsupported("", "an empty dataspace: there is no element"))
        kind, shape = self._elements(dataset)
        if kind.reason is None and math.prod(shape) >= 1 << 60:
            kind = ElementType(kind.dtype, reason=f"it claims {math.prod(shape)} elements")
        if kind.reason is not None:
            return Tensor(name, kind.dtype, shape, Unsupported("", kind.reason))
        return Tensor(name, kind.dtype, shape, self.places.place(name, path, dataset, kind))

    def _elements(self, dataset: Any) -> tuple[ElementType, tuple[int, ...]]:
        """The element type and the shape, which flipper's own files may state beside HDF5's."""
        from h5py import Dataset

        if not self.own_layout:
            return element_type(dataset.get_type(), lambda: self._text(Dataset(dataset), "dtype")), dataset.shape
        kind = element_type(dataset.get_type())
        dtype = self._text(Dataset(dataset), own.DTYPE_ATTRIBUTE)
        if dtype is None or kind.reason is not None:
            return kind, dataset.shape
        shape = dataset.shape
        try:
            layout = bits.layout(dtype)
            if layout.packed:
                shape = shape_attribute(Dataset(dataset), own.SHAPE_ATTRIBUTE) or ()
            needed = (math.prod(shape) * layout.width * layout.components + 7) // 8
        except UsageError as error:
            raise CheckpointError("header", f"a dataset states the dtype {dtype!r}, which doesn't hold") from error
        if min(shape, default=0) < 0 or needed != math.prod(dataset.shape) * dataset.get_type().get_size():
            raise CheckpointError("header", f"a dataset states {dtype} {shape}, which its bytes don't fit")
        return ElementType(dtype, kind.order), shape

    def _layer_names(self, file: Any, groups: list[hdf5_walk.Path]) -> dict[tuple[str, ...], str]:
        """What newer Keras writes beside the weights of a layer: its name in the model."""
        names = {}
        for path in groups:
            layer = tuple(_text(component) for component in path[:-1])
            if path[-1:] == (b"vars",) and is_layer(layer):
                name = self._text(file[b"/".join(path)], "name")
                if name is not None:
                    names[layer] = name
        return names

    def _text(self, owner: Any, name: str) -> str | None:
        return text_attribute(owner, name, self.source, self.userblock)

    def _recorded_tree(self) -> Tree:
        from flipper.checkpoints.structure import decode

        with self.opened() as file:
            dataset = file[own.TREE_DATASET]
            if dataset.shape != () or dataset.dtype.kind != "S":
                raise CheckpointError("header", "flipper's structure record is no string")
            return decode(bytes(dataset[()]).decode("ascii"))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _nested(groups: list[hdf5_walk.Path], names: list[tuple[hdf5_walk.Path, str]]) -> Tree:
    """Nested dicts for the groups, with the datasets as leaves."""
    root: dict[str, Tree] = {}
    for path in sorted(groups):
        _descend(root, path)
    for path, name in sorted(names):
        _descend(root, path[:-1])[_text(path[-1])] = Leaf(name)
    return root


def _descend(root: dict[str, Tree], path: hdf5_walk.Path) -> dict[str, Tree]:
    for component in path:
        root = root.setdefault(_text(component), {})
    return root
