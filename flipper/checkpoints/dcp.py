"""dcp: the directories of torch.distributed.checkpoint: `.metadata` and `.distcp` files that hold the chunks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flipper.checkpoints import archive_crcs, pytorch
from flipper.checkpoints.builders import DIMENSIONS
from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.dcp_pieces import Item, Items, Piece, Pieces, tile
from flipper.checkpoints.elements import Bytes, Int
from flipper.checkpoints.known_globals import known
from flipper.checkpoints.pickled_tree import globals_note
from flipper.checkpoints.pickles import PICKLE_LIMIT, load
from flipper.checkpoints.source import Source
from flipper.checkpoints.stubs import Global, Object
from flipper.checkpoints.tensor import Tensor, Unsupported
from flipper.checkpoints.ties import settle
from flipper.checkpoints.torch_place import DTYPES
from flipper.checkpoints.tree import Leaf, Opaque, Tree
from flipper.errors import CheckpointError

METADATA = ".metadata"


def sniff(folder: Path) -> bool:
    """Whether the directory has the metadata or the data files of torch.distributed.checkpoint."""
    return (folder / METADATA).is_file() or any(folder.glob("*.distcp"))


class _Saved(NamedTuple):
    """Where one chunk or object was saved; transformed: it went through a codec on the way."""

    item: Item
    transformed: bool


class DcpDirectory(Checkpoint):
    """One checkpoint directory. Data files are opened when a tensor in them is asked for."""

    format = "dcp"

    def __init__(self, path: Path) -> None:
        metadata, names = _read_metadata(path)
        saved = _saved(path, _attribute(path, metadata, "storage_data", dict))
        sources = _sources(path, saved)
        self._items = Items(sources)
        self._paths = metadata.get("planner_data")
        self._objects: dict[str, Item] = {}
        tensors = []
        for name, described in _attribute(path, metadata, "state_dict_metadata", dict).items():
            if not isinstance(name, str):
                raise _broken(path, "a name in state_dict_metadata is no text")
            attributes = described.attributes() if isinstance(described, Object) else {}
            if "chunks" in attributes:
                tensors.append(self._tensor(path, name, attributes, saved))
            elif (name, None) in saved:
                self._objects[name] = saved[name, None].item
        super().__init__(path, sources, settle(tensors))
        self.notes = globals_note(name for name in names if not known(name) and not _of_dcp(name))

    def _tensor(
        self, path: Path, name: str, attributes: Mapping[str, Any], saved: dict[tuple[Any, Any], _Saved]
    ) -> Tensor:
        shape = _size(path, attributes.get("size"))
        if math.prod(shape) >= 1 << 62:
            raise _broken(path, f"{name} has the impossible shape {list(shape)}")
        dtype, split = _dtype(path, attributes.get("properties"))
        pieces, transformed = [], False
        for chunk in _attribute(path, attributes, "chunks", list):
            described = chunk.attributes() if isinstance(chunk, Object) else {}
            offsets, sizes = _size(path, described.get("offsets")), _size(path, described.get("sizes"))
            if len(sizes) == len(shape) and not math.prod(sizes):
                continue
            found = saved.get((name, offsets)) or saved.get((name, None))
            if found is None or not len(offsets) == len(sizes) == len(shape):
                raise _broken(path, f"{name} has a chunk at {list(offsets)} that is stored nowhere")
            transformed = transformed or found.transformed
            pieces.append(Piece(offsets, sizes, found.item))
        pieces = sorted(set(pieces), key=lambda piece: piece.offsets)
        try:
            whole = tile(tuple(pieces), shape)
        except ValueError as error:
            raise _broken(path, f"{name}: {error}") from error
        if not whole:
            raise _broken(path, f"the chunks of {name} don't cover its shape {list(shape)} exactly once")
        reason = _obstacle(dtype, split, transformed)
        if reason is not None:
            return Tensor(name, dtype, shape, Unsupported("", reason))
        return Tensor(name, dtype, shape, Pieces(tuple(pieces), name, dtype, self._items))

    def tree(self) -> Tree:
        """What was saved: the nesting that the planner noted, with objects as they were pickled."""
        paths = self._paths if isinstance(self._paths, dict) else {}
        leaves: dict[str, Tree] = {name: Leaf(name) for tensor in self.tensors for name in tensor.names}
        root: dict[Any, Tree] = {}
        for name, value in [*leaves.items(), *((name, self._object(item)) for name, item in self._objects.items())]:
            _place(root, paths.get(name), name, value)
        return _lists(root)

    def _object(self, item: Item) -> Tree:
        archive = self._items.archive(item)
        if archive is None:
            return Opaque("bytes")
        contents = pytorch.read(archive)
        archive.source.close()
        return Opaque("torch.Tensor") if contents.tensors else contents.tree

    def _all_items(self, file: str) -> list[Item]:
        tensors = [tensor.place for tensor in self.tensors if isinstance(tensor.place, Pieces)]
        items = {piece.item for place in tensors for piece in place.pieces} | set(self._objects.values())
        return sorted(item for item in items if item.file == file)

    def checksum_masks(self, file: str, offsets: Int, masks: Bytes) -> tuple[Int, Bytes]:
        """The bytes of the CRCs of struck items, each of which is an archive of its own."""
        archives = []
        for item in self._all_items(file):
            first, last = np.searchsorted(offsets, [item.start, item.start + item.size])
            archive = self._items.archive(item) if first < last else None
            if archive is not None:
                archives.append((item.start, archive))
        return archive_crcs.crc_masks(archives, offsets, masks)

    def problems(self) -> Iterator[str]:
        """Items that are no readable archives of the tensor that they should hold, or whose CRCs don't hold."""
        for file in self.sources:
            for item in self._all_items(file):
                try:
                    archive = self._items.archive(item)
                    if archive is not None:
                        yield from archive_crcs.problems(archive)
                        archive.source.close()
                except CheckpointError as error:
                    yield str(error)


def _broken(path: Path, rule: str) -> CheckpointError:
    return CheckpointError("header", f"{path / METADATA}: {rule}")


def _read_metadata(path: Path) -> tuple[dict[Any, Any], list[Global]]:
    file = path / METADATA
    if not file.is_file():
        message = "there are .distcp files, but no .metadata: a save that was aborted, or is still going on"
        raise CheckpointError("missing-shard", f"{path}: {message}")
    source = Source(file)
    value, machine = load(source.head(PICKLE_LIMIT + 1), str(file))
    if not isinstance(value, Object) or not value.name.endswith(".Metadata"):
        raise _broken(path, "it describes no checkpoint")
    return value.attributes(), list(machine.globals.values())


def _attribute(path: Path, attributes: Mapping[Any, Any], name: str, kind: type) -> Any:
    value = attributes.get(name)
    if not isinstance(value, kind):
        raise _broken(path, f"it has no {name}")
    return value


def _saved(path: Path, storage: dict[Any, Any]) -> dict[tuple[Any, Any], _Saved]:
    """(name, offsets or None) -> where that was saved."""
    saved = {}
    for index, info in storage.items():
        if not isinstance(index, Object) or not isinstance(info, Object):
            raise _broken(path, "storage_data does not map indexes to places")
        key, place = index.attributes(), info.attributes()
        file, span = place.get("relative_path"), (place.get("offset"), place.get("length"))
        if not isinstance(file, str) or not isinstance(key.get("fqn"), str):
            raise _broken(path, "a place in storage_data lacks a path or a name")
        start, size = _size(path, span)
        if Path(file).is_absolute() or ".." in Path(file).parts or "\0" in file:
            raise _broken(path, f"it names a file outside the directory: {file[:80]!r}")
        offsets = None if key.get("offset") is None else _size(path, key["offset"])
        saved[key["fqn"], offsets] = _Saved(Item(file, start, size), bool(place.get("transform_descriptors")))
    return saved


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _sources(path: Path, saved: Mapping[Any, _Saved]) -> dict[str, Source]:
    sources = {}
    for file in sorted({place.item.file for place in saved.values()}):
        if not os.path.isfile(path / file):  # False, too, for names that no file can have
            raise CheckpointError("missing-shard", f"{path}: .metadata names {file}, which is not there")
        sources[file] = Source(path / file)
    for place in saved.values():
        item, size = place.item, sources[place.item.file].size
        if item.start + item.size > size:
            seen = f"an item should end at byte {item.start + item.size}, the file has {size}"
            raise CheckpointError("truncated", f"{path / item.file}: {seen}")
    return sources


def _size(path: Path, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > DIMENSIONS or not all(_natural(item) for item in value):
        raise _broken(path, "a size, offset or length is no natural number")
    return tuple(value)


def _dtype(path: Path, properties: Any) -> tuple[str, int]:
    """flipper's dtype and how many of its elements one of torch's is; (torch's, 0) where flipper doesn't know it."""
    state = properties.state if isinstance(properties, Object) else None
    found = state[0] if isinstance(state, tuple) and state else None
    if found is None and isinstance(state, dict):
        found = state.get("dtype")
    if not isinstance(found, Global):
        raise _broken(path, "a tensor has no dtype")
    return DTYPES.get(found.name, (found.name, 0))


def _obstacle(dtype: str, split: int, transformed: bool) -> str | None:
    """Why a tensor can't be struck, else None."""
    if transformed:
        return "saved through a codec (transform_descriptors)"
    if split != 1:
        return f"{dtype} in torch.distributed.checkpoint is not supported"
    return None


def _of_dcp(name: Global) -> bool:
    """Whether torch writes the name itself; enumerations are written by getattr under Python 3.11.0 to 3.11.3."""
    known_here = ("pathlib.PosixPath", "builtins.getattr")
    return name.module.startswith("torch.distributed.checkpoint.") or name.qualified in known_here


def _place(root: dict[Any, Tree], path: Any, name: str, value: Tree) -> None:
    """Put a value into nested dicts at the path that the planner noted, or under its whole name."""
    keys = path if isinstance(path, tuple) and path and all(type(key) in (str, int) for key in path) else (name,)
    if ".".join(map(str, keys)) != name:
        keys = (name,)
    node = root
    for key in keys[:-1]:
        inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            node, keys = root, (name,)
            break
        node = inner
    node[keys[-1]] = value


def _lists(node: Tree) -> Tree:
    """Dicts whose keys are 0, 1, 2, ... as lists, which they were."""
    if not isinstance(node, dict):
        return node
    grown = {key: _lists(value) for key, value in node.items()}
    if grown and all(type(key) is int for key in grown) and sorted(grown) == list(range(len(grown))):
        return [grown[index] for index in range(len(grown))]
    return grown
