"""The groups and links of an HDF5 file: every dataset once with all its paths, and the links that lead elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flipper.errors import CheckpointError

MAX_DEPTH = 256
"""Groups inside groups; real checkpoints have about ten."""
MAX_REPEATS = 20_000
"""Paths through groups that were seen before; groups that are linked twice at every level would give 2**depth."""

Path = tuple[bytes, ...]


@dataclass
class Found:
    """What a walk found, in no particular order.

    datasets: object address -> all paths of the dataset. groups: paths of all groups.
    elsewhere: path -> what a soft or external link there points to.
    """

    datasets: dict[int, list[Path]] = field(default_factory=dict)
    groups: list[Path] = field(default_factory=list)
    elsewhere: dict[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Group:
    """A group on the way down. above: the group that it was reached from."""

    address: int
    path: Path
    above: _Group | None

    def within(self, address: int) -> bool:
        """Whether the group at `address` is this one or one above it."""
        group: _Group | None = self
        while group is not None:
            if group.address == address:
                return True
            group = group.above
        return False


def walk(root: Any) -> Found:
    """Follow all hard links from an h5py GroupID; loops end where they close.

    Raises CheckpointError when the file nests deeper, or holds more paths, than any checkpoint does.
    """
    from h5py import h5g, h5o

    found = Found()
    waiting = [_Group(h5o.get_info(root).addr, (), None)]
    seen: set[int] = set()
    repeats = 0
    while waiting:
        group = waiting.pop()
        found.groups.append(group.path)
        here = h5g.open(root, b"/".join(group.path)) if group.path else root
        for name in _names(here):
            repeats += group.address in seen
            if repeats > MAX_REPEATS or len(group.path) > MAX_DEPTH:
                bounds = f"{MAX_REPEATS} paths through groups linked twice, or {MAX_DEPTH} levels of groups"
                raise CheckpointError("header", f"the HDF5 file has more than {bounds}")
            waiting.extend(_follow(found, here, group, name))
        seen.add(group.address)
    return found


def _follow(found: Found, here: Any, group: _Group, name: bytes) -> Iterator[_Group]:
    """Note what a link of a group leads to; yields the group if it is one that is not above."""
    from h5py import h5l, h5o

    path = (*group.path, name)
    kind = here.links.get_info(name).type
    if kind != h5l.TYPE_HARD:
        found.elsewhere[path] = _target(here, name, kind)
        return
    info = h5o.get_info(here, name)
    if info.type == h5o.TYPE_DATASET:
        found.datasets.setdefault(info.addr, []).append(path)
    elif info.type == h5o.TYPE_GROUP and not group.within(info.addr):
        yield _Group(info.addr, path, group)


def _names(group: Any) -> list[bytes]:
    names: list[bytes] = []
    if group.get_num_objs():
        group.links.iterate(names.append)
    return names


def _target(group: Any, name: bytes, kind: int) -> str:
    from h5py import h5l

    if kind == h5l.TYPE_SOFT:
        return f"soft link to {_text(group.links.get_val(name))}"
    if kind == h5l.TYPE_EXTERNAL:
        file, path = group.links.get_val(name)
        return f"external link to {_text(path)} in {_text(file)}"
    return f"user-defined link of class {kind}"


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
