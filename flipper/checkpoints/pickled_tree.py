"""Pickled tree: the neutral tree of what a pickle stream describes, and its tensors under dotted names.

A tensor saved alone is called `tensor`. A module has the names of its state dict. Tensors made of tensors have parts:
`w.indices` and `w.values` (sparse; `crow_indices`, `col_indices` ... where rows or columns are compressed), `w.values`,
`w.sizes`, `w.strides` and `w.offsets` (nested), `w.scales` and `w.zero_points` (quantised by channel, beside `w`
itself), and the attributes of a wrapper. A DTensor is its local tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flipper.checkpoints.stubs import Global, Object, Parts, Storage, StoredTensor
from flipper.checkpoints.tree import Leaf, Opaque, Tree
from flipper.errors import CheckpointError, printable

DEPTH_LIMIT = 200
"""Levels of nesting; a tree is walked by recursion."""

BARE = "tensor"
"""Name of a tensor that was saved alone."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")


class PickledTree:
    """The tree under `value`, grown at once.

    tensors: (dotted name, what the stream says of it), in the order of the stream.
    limit: values that may be visited: shared ones are visited by each of their names. name: that of the root.
    Raises CheckpointError: pickle-too-deep, pickle-too-big.
    """

    def __init__(self, value: Any, where: str, limit: int, name: str = "") -> None:
        self.where = where
        self.left = limit
        self.tensors: list[tuple[str, StoredTensor]] = []
        self._path: set[int] = set()
        self.root: Tree = self._grow(value, name)

    def _grow(self, value: Any, name: str) -> Tree:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is StoredTensor:
            return self._leaf(value, name)
        if kind is Storage:
            return self._leaf(StoredTensor(value, value.dtype or "uint8", 0, (value.count,), (1,)), name)
        if id(value) in self._path:
            return Opaque(value.name if kind is Object else "cycle")
        if len(self._path) >= DEPTH_LIMIT:
            raise CheckpointError("pickle-too-deep", f"{self.where}: values nest over {DEPTH_LIMIT} levels deep")
        self._path.add(id(value))
        try:
            return self._grow_inside(value, name)
        finally:
            self._path.discard(id(value))

    def _grow_inside(self, value: Any, name: str) -> Tree:
        if type(value) is dict:
            return self._mapping(value, name)
        if type(value) is list:
            self._spend(len(value))
            return [self._grow(item, join(name, index)) for index, item in enumerate(value)]
        if type(value) is tuple:
            self._spend(len(value))
            return tuple(self._grow(item, join(name, index)) for index, item in enumerate(value))
        if type(value) is Parts:
            return self._parts(value, name)
        if type(value) is Object:
            return self._object(value, name)
        return Opaque(value.qualified if type(value) is Global else type(value).__name__)

    def _spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            message = "shared values stand for far more values than the file holds"
            raise CheckpointError("pickle-too-big", f"{self.where}: {message}")

    def _leaf(self, stored: StoredTensor, name: str) -> Leaf:
        self.tensors.append((name or BARE, stored))
        return Leaf(name or BARE, stored.parameter, stored.frozen)

    def _mapping(self, mapping: dict[Any, Any], name: str) -> dict[Any, Tree]:
        self._spend(len(mapping))
        grown = {}
        for index, (key, value) in enumerate(mapping.items()):
            plain = key if type(key) in (str, int, bool, float, type(None)) else _key_text(key, index)
            grown[plain] = self._grow(value, join(name, plain))
        return grown

    def _parts(self, parts: Parts, name: str) -> Tree:
        """The tensors that make up one; the main one of a quantised tensor bears the name itself."""
        grown = {part: self._grow(value, join(name, part) if part else name) for part, value in parts.parts.items()}
        grown[""] = grown.get("", Opaque(parts.name))
        return Opaque(parts.name) if len(grown) == 1 else grown

    def _object(self, value: Object, name: str) -> Tree:
        if value.name.endswith("multiarray._reconstruct"):
            return self._array(value.state[1:3] if type(value.state) is tuple else (), name)
        if value.name.endswith("numeric._frombuffer"):
            return self._array(value.args[2:0:-1], name)
        attributes = value.attributes()
        if all(type(attributes.get(part)) is dict for part in _MODULE_PARTS):
            return self._module(attributes, name)
        if value.name in _NAMESPACES or value.name.startswith("__torch__."):
            return self._mapping(attributes, name)
        found: list[Tree] = []
        for content in (attributes or value.state, value.mapping, value.items, value.args):
            before = len(self.tensors)
            grown = self._grow(content, name) if content else None
            if len(self.tensors) > before:
                found.append(grown)
        return _together(found) if found else Opaque(value.name)

    def _module(self, attributes: dict[Any, Any], name: str) -> dict[Any, Tree]:
        """What its state dict would hold, and other tensors that it holds as plain attributes.

        Attributes that only repeat what the state dict has (an RNN's list of its weights) are left out.
        """
        first = len(self.tensors)
        grown: dict[Any, Tree] = {}
        for part in _MODULE_PARTS:
            held = {key: value for key, value in attributes[part].items() if value is not None}
            grown.update(self._mapping(held, name))
        own = {id(stored) for _, stored in self.tensors[first:]}
        for key, value in attributes.items():
            if key not in _MODULE_PARTS and key not in grown:
                before = len(self.tensors)
                self._spend(1)
                tree = self._grow(value, join(name, key))
                if all(id(stored) in own for _, stored in self.tensors[before:]):
                    del self.tensors[before:]
                else:
                    grown[key] = tree
        return grown

    def _array(self, described: tuple[Any, ...], name: str) -> Leaf:
        """A numpy array: its numbers are part of the stream. described: its shape and dtype, if it has them."""
        shape: tuple[int, ...] = ()
        dtype = "numpy"
        if len(described) == 2:
            lengths, kind = described
            if type(lengths) is tuple and all(type(item) is int and 0 <= item < 1 << 31 for item in lengths):
                shape = lengths
            if type(kind) is Object and kind.args and type(kind.args[0]) is str:
                dtype = f"numpy {kind.args[0][:20]}"
        reason = "a numpy array: its numbers are literals of the pickle stream"
        return self._leaf(StoredTensor(None, dtype, 0, shape[:8], (0,) * len(shape[:8]), reason=reason), name)


def _together(trees: list[Tree]) -> Tree:
    """What is in an object: its attributes, and what it holds as a dict or list; one alone is the object."""
    if len(trees) == 1:
        return trees[0]
    whole: dict[Any, Tree] = {}
    for tree in trees:
        if isinstance(tree, list | tuple):
            whole.update(enumerate(tree))
        else:
            whole.update(tree if isinstance(tree, dict) else {"": tree})
    return whole


def join(name: str, key: Any) -> str:
    """The name of what `key` leads to in `name`."""
    return f"{name}.{key}" if name else str(key)


def _key_text(key: Any, index: int) -> str:
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    return key.qualified if isinstance(key, Global) else f"{index}"


def globals_note(names: Iterator[Global]) -> tuple[str, ...]:
    """What the user should hear about classes and functions that the stream names."""
    found = sorted({name.qualified for name in names})
    if not found:
        return ()
    shown = ", ".join(name[:80] for name in found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return (printable(f"this file names {shown}; nothing in it was run"),)
