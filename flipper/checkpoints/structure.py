"""The structure record: a tree as JSON text and back, without loss.

None, booleans, integers up to 64 bits, finite floats, and strings are JSON's own, lists are arrays. All else is an
object with one key that says what it is:

    {"dict": {...}}           all keys are strings          {"pairs": [[key, value], ...]}   other keys too
    {"tuple": [...]}          {"complex": [real, imag]}     {"bytes": base64}
    {"int": "-0x1f..."}       beyond 64 bits                {"float": hex of the 8 bytes}    nan, infinities
    {"str": hex of UTF-8}     with lone surrogates          {"opaque": name}
    {"tensor": name}          {"parameter": name}           Leaf
    {"frozen": name}          a parameter that autograd doesn't track
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

from flipper.checkpoints.tree import Leaf, Opaque, Tree
from flipper.errors import CheckpointError, UsageError

MAX_DEPTH: Final = 200
"""Levels of a tree; real checkpoints have about ten."""
MAX_NODES: Final = 1 << 22
"""Values in a tree; a few lists that hold each other many times over would give 2**n."""

Keys = tuple[Any, ...]


def walk(tree: Tree, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every value that holds no others, with the keys and indexes that lead to it, in the tree's own order.

    Raises CheckpointError (pickle-too-deep, pickle-too-big) for a tree that no checkpoint has: one that loops, say.
    """
    waiting: list[tuple[Keys, Any]] = [(keys, tree)]
    count = 0
    while waiting:
        here, node = waiting.pop()
        count += 1
        if len(here) > MAX_DEPTH:
            raise CheckpointError("pickle-too-deep", f"the structure nests deeper than {MAX_DEPTH} levels")
        if count + len(waiting) > MAX_NODES:
            raise CheckpointError("pickle-too-big", f"the structure holds more than {MAX_NODES} values")
        if isinstance(node, dict):
            waiting.extend(((*here, key), node[key]) for key in reversed(node))
        elif isinstance(node, (list, tuple)):
            waiting.extend(((*here, index), node[index]) for index in range(len(node) - 1, -1, -1))
        else:
            yield here, node


def encode(tree: Tree) -> str:
    """The tree as one line of ASCII JSON.

    Raises UsageError for a value that is none of a tree's kinds, CheckpointError for a tree out of all bounds.
    """
    for _ in walk(tree):
        pass
    return json.dumps(_to_json(tree), separators=(",", ":"), allow_nan=False)


def decode(text: str) -> Tree:
    """The tree that `encode` wrote; raises CheckpointError("header") for any other text."""
    try:
        return _from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, struct.error) as error:
        raise CheckpointError("header", f"flipper's structure record is damaged ({str(error)[:80]})") from error


def _to_json(node: Any) -> Any:
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, list):
        return [_to_json(item) for item in node]
    if isinstance(node, dict):
        return _dict_to_json(node)
    writer = _WRITERS.get(type(node))
    if writer is None:
        raise UsageError(f"a {type(node).__qualname__} can't be carried to another format")
    return writer(node)


def _dict_to_json(node: dict[Any, Any]) -> Any:
    if all(type(key) is str and _is_text(key) for key in node):
        return {"dict": {key: _to_json(value) for key, value in node.items()}}
    return {"pairs": [[_to_json(key), _to_json(value)] for key, value in node.items()]}


def _is_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _int_to_json(node: int) -> Any:
    return node if -(1 << 63) <= node < 1 << 64 else {"int": hex(node)}


def _float_to_json(node: float) -> Any:
    return node if math.isfinite(node) else {"float": struct.pack(">d", node).hex()}


def _str_to_json(node: str) -> Any:
    return node if _is_text(node) else {"str": node.encode("utf-8", "surrogatepass").hex()}


def _kind(node: Leaf) -> str:
    if not node.parameter:
        return "tensor"
    return "frozen" if node.frozen else "parameter"


_WRITERS: Final[dict[type, Callable[[Any], Any]]] = {
    int: _int_to_json,
    float: _float_to_json,
    str: _str_to_json,
    complex: lambda node: {"complex": [_float_to_json(node.real), _float_to_json(node.imag)]},
    bytes: lambda node: {"bytes": base64.b64encode(node).decode("ascii")},
    tuple: lambda node: {"tuple": [_to_json(item) for item in node]},
    Leaf: lambda node: {_kind(node): _str_to_json(node.name)},
    Opaque: lambda node: {"opaque": _str_to_json(node.name)},
}


def _from_json(node: Any) -> Tree:
    if isinstance(node, list):
        return [_from_json(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    return _READERS[kind](content)


def _text(content: Any) -> str:
    text = _from_json(content)
    if not isinstance(text, str):
        raise TypeError("a name is no string")
    return text


def _float_from_json(content: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(content))
    return float(value)


def _complex_from_json(content: Any) -> complex:
    real, imaginary = content
    return complex(_from_json(real), _from_json(imaginary))


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "dict": lambda content: {key: _from_json(value) for key, value in content.items()},
    "pairs": lambda content: {_from_json(key): _from_json(value) for key, value in content},
    "tuple": lambda content: tuple(_from_json(item) for item in content),
    "complex": _complex_from_json,
    "bytes": lambda content: base64.b64decode(content, validate=True),
    "int": lambda content: int(content, 16),
    "float": _float_from_json,
    "str": lambda content: bytes.fromhex(content).decode("utf-8", "surrogatepass"),
    "tensor": lambda content: Leaf(_text(content)),
    "parameter": lambda content: Leaf(_text(content), parameter=True),
    "frozen": lambda content: Leaf(_text(content), parameter=True, frozen=True),
    "opaque": lambda content: Opaque(_text(content)),
}
