"""Stubs: the inert values that a pickle stream is read into; none of them can do anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Global(NamedTuple):
    """A name of a module that the stream refers to; never looked up."""

    module: str
    name: str

    @property
    def qualified(self) -> str:
        """Module and name joined by a dot."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Object:
    """What some class or function would have made: its name and all that the stream gives it.

    args: of the call. state: what the stream sets on it. items, mapping: what it appends, and what it sets by key;
    None until it does, since one byte of a stream can make an object.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] | None = None
    mapping: dict[Any, Any] | None = None

    def attributes(self) -> dict[Any, Any]:
        """The state as attribute -> value; a pair of two dicts (with slots) is joined."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            return {**(state[0] if isinstance(state[0], dict) else {}), **state[1]}
        return state if isinstance(state, dict) else {}


@dataclass(eq=False, slots=True)
class Storage:
    """A run of bytes that the stream refers to by key.

    dtype: as torch spells it; None for untyped bytes. count: elements of dtype, or bytes.
    first: elements to leave out at the beginning (views of storages in old files).
    """

    key: str
    dtype: str | None
    count: int
    first: int = 0


@dataclass(eq=False, slots=True)
class StoredTensor:
    """A tensor as the stream describes it.

    dtype: as torch spells it. offset, strides: in elements of dtype. parameter, frozen: as in tree.Leaf.
    reason: why it can't be struck, else None.
    """

    storage: Storage | None
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parameter: bool = False
    frozen: bool = False
    reason: str | None = None


@dataclass(eq=False, slots=True)
class Parts:
    """A tensor made of tensors: sparse, nested, or a wrapper around inner ones. name: of its class."""

    name: str
    parts: Mapping[str, Any]


def safe_key(key: Any, position: int) -> Any:
    """A key that is safe to hash and to print: no deep tuple, no integer whose hash the stream could choose.

    position: how many keys there were before, for one that is neither.
    """
    if key is None or isinstance(key, (str, bool, float, bytes, Global, Object, StoredTensor)):
        return key
    if isinstance(key, int):
        return key if key.bit_length() <= 64 else hex(key)
    if isinstance(key, tuple) and len(key) <= 8 and all(_plain(item) for item in key):
        return repr(key)
    return f"{type(key).__name__}-{position}"


def _plain(item: Any) -> bool:
    """Whether a part of a key is quick to print: the stream can use the same long text as a key many times."""
    if isinstance(item, str):
        return len(item) <= _TEXT_LIMIT
    return isinstance(item, (bool, float)) or (isinstance(item, int) and item.bit_length() <= 64)


_TEXT_LIMIT = 128
"""Characters of a string in a tuple that is a key."""
