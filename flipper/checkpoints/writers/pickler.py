"""A small pickler for trees: protocol 2, as torch.save uses, with calls of classes that it doesn't import."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from flipper.checkpoints.tree import Leaf
from flipper.errors import UsageError

LeafWriter = Callable[["Pickler", Leaf], None]


class Pickler:
    """Pickles one tree; what a leaf becomes is the caller's affair.

    Only operations that torch.load(weights_only=True) knows are emitted, but for integers beyond 255 bytes.
    """

    def __init__(self, write_leaf: LeafWriter) -> None:
        self._write_leaf = write_leaf
        self._pieces: list[bytes] = []
        self._memo: dict[tuple[str, str], int] = {}

    def dump(self, tree: Any) -> bytes:
        """The pickle of `tree`; raises UsageError for a value that is none of a tree's kinds."""
        self.emit(b"\x80\x02")
        self.value(tree)
        self.emit(b".")
        return b"".join(self._pieces)

    def emit(self, code: bytes) -> None:
        """Append raw pickle code."""
        self._pieces.append(code)

    def value(self, node: Any) -> None:
        """Push a value of a tree."""
        if isinstance(node, Leaf):
            self._write_leaf(self, node)
            return
        writer = _WRITERS.get(type(node))
        if writer is None:
            raise UsageError(f"a {type(node).__qualname__} can't be carried to another format")
        writer(self, node)

    def reference(self, module: str, name: str) -> None:
        """Push the class or function `module.name`."""
        number = self._memo.get((module, name))
        if number is not None:
            self.emit(b"h" + bytes([number]))
            return
        number = self._memo[module, name] = len(self._memo)
        self.emit(b"c" + f"{module}\n{name}\n".encode() + b"q" + bytes([number]))

    def call(self, module: str, name: str, arguments: Callable[[], None]) -> None:
        """Push the result of calling `module.name`; `arguments` pushes them one by one."""
        self.reference(module, name)
        self.emit(b"(")
        arguments()
        self.emit(b"tR")


def _int(pickler: Pickler, node: int) -> None:
    if 0 <= node < 1 << 16:
        pickler.emit(b"K" + bytes([node]) if node < 256 else b"M" + struct.pack("<H", node))
    elif -(1 << 31) <= node < 1 << 31:
        pickler.emit(b"J" + struct.pack("<i", node))
    else:
        digits = node.to_bytes(node.bit_length() // 8 + 1, "little", signed=True)
        short = len(digits) < 256
        pickler.emit((b"\x8a" + bytes([len(digits)]) if short else b"\x8b" + struct.pack("<i", len(digits))) + digits)


def _str(pickler: Pickler, node: str) -> None:
    data = node.encode("utf-8", "surrogatepass")
    if len(data) >= 1 << 32:
        raise UsageError("a string of 4 GiB or more can't be carried to PyTorch's format")
    pickler.emit(b"X" + struct.pack("<I", len(data)) + data)


def _bytes(pickler: Pickler, node: bytes) -> None:
    """Protocol 2 has no code for bytes: they are Latin-1 text, encoded again."""

    def arguments() -> None:
        _str(pickler, node.decode("latin-1"))
        _str(pickler, "latin1")

    pickler.call("_codecs", "encode", arguments)


def _complex(pickler: Pickler, node: complex) -> None:
    def arguments() -> None:
        pickler.value(node.real)
        pickler.value(node.imag)

    pickler.call("__builtin__", "complex", arguments)


def _dict(pickler: Pickler, node: dict[Any, Any]) -> None:
    pickler.emit(b"}(")
    for key, value in node.items():
        pickler.value(key)
        pickler.value(value)
    pickler.emit(b"u")


def _list(pickler: Pickler, node: list[Any]) -> None:
    pickler.emit(b"](")
    for item in node:
        pickler.value(item)
    pickler.emit(b"e")


def _tuple(pickler: Pickler, node: tuple[Any, ...]) -> None:
    pickler.emit(b"(")
    for item in node:
        pickler.value(item)
    pickler.emit(b"t")


_WRITERS: Final[dict[type, Callable[[Pickler, Any], None]]] = {
    type(None): lambda pickler, node: pickler.emit(b"N"),
    bool: lambda pickler, node: pickler.emit(b"\x88" if node else b"\x89"),
    int: _int,
    float: lambda pickler, node: pickler.emit(b"G" + struct.pack(">d", node)),
    complex: _complex,
    str: _str,
    bytes: _bytes,
    dict: _dict,
    list: _list,
    tuple: _tuple,
}
