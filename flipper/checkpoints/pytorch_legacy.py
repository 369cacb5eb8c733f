"""pytorch-legacy: what torch.save wrote before 1.6: five pickle streams in a row, then the storages one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.known_globals import known
from flipper.checkpoints.pickle_operations import Ended
from flipper.checkpoints.pickled_tree import PickledTree, globals_note
from flipper.checkpoints.pickles import PICKLE_LIMIT, Machine
from flipper.checkpoints.pytorch import SHARED_LIMIT
from flipper.checkpoints.source import Source
from flipper.checkpoints.stubs import Global, Storage
from flipper.checkpoints.ties import settle
from flipper.checkpoints.torch_place import Home, item_bytes, settle_tensor
from flipper.checkpoints.tree import Tree
from flipper.errors import CheckpointError

MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")
"""The number that the first stream holds."""

PROTOCOL = 1001

_WINDOW = 1 << 16
"""Bytes of the file that are read at first; doubled while the streams go on beyond them."""


def sniff(source: Source) -> bool:
    """Whether the first pickle stream is the magic number of old PyTorch files."""
    head = source.head(32)
    return head[:1] == b"\x80" and MAGIC in head[2:16]


class LegacyFile(Checkpoint):
    """One file of torch.save of the old kind. There are no checksums in it."""

    format = "pytorch-legacy"

    def __init__(self, path: Path) -> None:
        source = Source(path)
        streams = _read_streams(source)
        grown = PickledTree(streams.value, str(path), streams.steps + SHARED_LIMIT)
        homes, end = _find_storages(source, streams)

        def home_of(storage: Storage) -> Home:
            if storage.key not in homes:
                raise _broken(source, f"the storage {storage.key[:40]!r} is not among those listed")
            return homes[storage.key]

        self._tree = grown.root
        tensors = [settle_tensor(name, stored, home_of, str(path)) for name, stored in grown.tensors]
        super().__init__(path, {"": source}, settle(tensors))
        self.notes = globals_note(name for name in streams.globals if not known(name))
        if end < source.size:
            self.notes += (f"{source.size - end} bytes follow the last storage; PyTorch doesn't read them",)

    def tree(self) -> Tree:
        """What was saved, with tensors as leaves."""
        return self._tree


class _Streams(NamedTuple):
    """What the five streams hold, how many operations they took, and where they end."""

    value: Any
    keys: Any
    storages: dict[str, Storage]
    globals: list[Global]
    steps: int
    end: int


def _broken(source: Source, rule: str) -> CheckpointError:
    return CheckpointError("header", f"{source.path}: old PyTorch file: {rule}")


def _read_streams(source: Source) -> _Streams:
    """Reads the streams in a window that grows until they end in it."""
    window = _WINDOW
    while True:
        try:
            return _run_streams(source.head(window), source)
        except Ended:
            if window >= source.size:
                raise CheckpointError("truncated", f"{source.path}: the file ends inside its pickle streams") from None
        if window >= PICKLE_LIMIT:
            raise CheckpointError("pickle-too-big", f"{source.path}: pickle streams of over {PICKLE_LIMIT} bytes")
        window *= 4


def _run_streams(data: bytes, source: Source) -> _Streams:
    values: list[Any] = []
    storages: dict[str, Storage] = {}
    names: list[Global] = []
    steps = position = 0
    for _ in range(5):
        machine = Machine(data, str(source.path), position)
        values.append(machine.run())
        position = machine.position
        steps += machine.steps
        storages.update(machine.storages)
        names += machine.globals.values()
    _magic, protocol, _system, value, keys = values
    if type(protocol) is not int or protocol != PROTOCOL:
        seen = hex(protocol)[:20] if type(protocol) is int else type(protocol).__name__  # a tuple may nest too deep
        raise _broken(source, f"protocol {seen}, known is {PROTOCOL}")
    return _Streams(value, keys, storages, names, steps, position)


def _find_storages(source: Source, streams: _Streams) -> tuple[dict[str, Home], int]:
    """Where each storage lies, and the end of the last: a count of elements, then the bytes, little-endian always."""
    if type(streams.keys) is not list or not all(type(key) is str for key in streams.keys):
        raise _broken(source, "the list of storages is missing")
    homes: dict[str, Home] = {}
    position = streams.end
    for key in streams.keys:
        storage = streams.storages.get(key)
        if storage is None or key in homes:
            raise _broken(source, f"the storage {key[:40]!r} is listed, but not described once")
        count = int.from_bytes(source.read(position, 8), "little", signed=True)
        size = count * item_bytes(storage)
        if count < 0 or position + 8 + size > source.size:
            seen = f"storage {key[:40]} needs {size} bytes at {position + 8}"
            raise CheckpointError("truncated", f"{source.path}: {seen}, the file has {source.size}")
        homes[key] = Home("", position + 8, size, "little")
        position += 8 + size
    return homes, position
