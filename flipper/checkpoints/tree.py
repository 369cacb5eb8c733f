"""The structure of a checkpoint: nested dicts, lists and scalars with tensors as leaves, as a neutral tree.

A tree is made of dict, list, tuple, None, bool, int, float, complex, str and bytes, of Leaf and of Opaque. `convert`
carries it from one container to another; nothing in it was ever executed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tree = Any


@dataclass(frozen=True)
class Leaf:
    """A tensor in the tree.

    name: as in Checkpoint.tensors, name or alias. parameter: it was an nn.Parameter; frozen: one that autograd doesn't
    track.
    """

    name: str
    parameter: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class Opaque:
    """An object of a class that flipper doesn't know, never imported. name: its qualified name, such as a.b.C."""

    name: str
