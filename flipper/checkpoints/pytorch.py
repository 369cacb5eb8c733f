"""pytorch: the zip archives of torch.save: a pickle stream that describes the tensors, an entry for each storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flipper.bits.layout import Bits
from flipper.checkpoints.archive_crcs import crc_masks, problems
from flipper.checkpoints.archives import STORED, Archive, Entry, broken, mentions
from flipper.checkpoints.checkpoint import Checkpoint, Edit, Region
from flipper.checkpoints.elements import Bytes, Int, byte_masks, combine, gather
from flipper.checkpoints.inflate import inflated
from flipper.checkpoints.known_globals import known
from flipper.checkpoints.pickled_tree import PickledTree, globals_note
from flipper.checkpoints.pickles import PICKLE_LIMIT, load
from flipper.checkpoints.rezip import rezip
from flipper.checkpoints.source import Source
from flipper.checkpoints.stubs import Storage
from flipper.checkpoints.tensor import Deflated, Tensor
from flipper.checkpoints.ties import settle
from flipper.checkpoints.torch_place import Home, settle_tensor
from flipper.checkpoints.tree import Tree
from flipper.errors import CheckpointError

SHARED_LIMIT = 1_000_000
"""Visits of shared values, beyond one of each value that the stream makes."""


def sniff(source: Source) -> bool:
    """Whether it is a zip archive with a data.pkl; raises CheckpointError for an archive that is cut off."""
    return source.head(4) == b"PK\3\4" and mentions(source, b"data.pkl")


class PyTorchFile(Checkpoint):
    """One file of torch.save. archive: where its entries lie."""

    format = "pytorch"

    def __init__(self, path: Path) -> None:
        source = Source(path)
        self.archive = Archive(source)
        self._contents = self._read()
        self._open_entry = ""
        self._content: Source = source
        super().__init__(path, {"": source}, settle(self._contents.tensors))
        self.notes = self._contents.notes
        if self.archive.appended:
            self.notes += (f"{self.archive.appended} bytes follow the archive; PyTorch doesn't read them",)

    def _read(self) -> Contents:
        return read(self.archive)

    def tree(self) -> Tree:
        """What was saved, with tensors as leaves."""
        return self._contents.tree

    def checksum_masks(self, file: str, offsets: Int, masks: Bytes) -> tuple[Int, Bytes]:
        """The bytes of every stored copy of the CRCs of struck entries; none in an archive without CRCs."""
        return crc_masks([(0, self.archive)], offsets, masks)

    def rewrite(
        self, target: Path, file: str, edits: Sequence[Edit], keep_checksums: bool = False
    ) -> tuple[Region, ...]:
        """Make edits inside deflated entries: the archive is written anew with these entries changed."""
        parts: dict[str, list[tuple[Int, Bytes]]] = {}
        for tensor, flat, xor in edits:
            place = tensor.place
            if not isinstance(place, Deflated):
                raise CheckpointError("unsupported-storage", f"{tensor.name}: {place.storage} bytes can't be rewritten")
            for part in place.inside.locate(tensor.dims, tensor.layout, flat):
                masks = byte_masks(part.offsets, xor[part.where], tensor.layout, part.order, part.shifts)
                parts.setdefault(place.entry, []).append(masks)
        changes = {
            entry: combine(np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found]))
            for entry, found in parts.items()
        }
        changes = {entry: change for entry, change in changes.items() if len(change[0])}
        return rezip(Archive(Source(target)), changes, target, keep_checksums)

    def _read_boxed(self, tensor: Tensor, flat: Int) -> Bits:
        place = tensor.place
        if not isinstance(place, Deflated):
            return super()._read_boxed(tensor, flat)
        if self._open_entry != place.entry:
            self._open_entry, self._content = place.entry, inflated(self.archive, self.archive.by_name[place.entry])
        bits = np.zeros(len(flat), np.uint64)
        for part in place.inside.locate(tensor.dims, tensor.layout, flat):
            bits[part.where] = gather(self._content, part.offsets, tensor.layout, part.order, part.shifts)
        return bits

    def problems(self) -> Iterator[str]:
        """Entries whose local header or CRC doesn't hold."""
        return problems(self.archive)


@dataclass(frozen=True)
class Contents:
    """What an archive holds. tensors: under all their names, in the order of the stream."""

    tree: Tree
    tensors: tuple[Tensor, ...]
    notes: tuple[str, ...]


def read(archive: Archive) -> Contents:
    """What a torch.save archive holds; tensors lie in the file "" at places of the archive's source."""
    prefix = find_prefix(archive)
    return read_stream(archive, f"{prefix}data.pkl", f"{prefix}data/", byte_order(archive, prefix))


def find_prefix(archive: Archive) -> str:
    """The folder in the archive that holds its data.pkl, with the slash."""
    found = [name[: -len("data.pkl")] for name in archive.by_name if name.rsplit("/", 1)[-1] == "data.pkl"]
    top = min((prefix.count("/") for prefix in found), default=0)
    found = [prefix for prefix in found if prefix.count("/") == top]
    if len(found) != 1:
        raise broken(archive.source, f"{len(found)} entries could be the data.pkl of a PyTorch file; one is needed")
    return found[0]


def byte_order(archive: Archive, prefix: str) -> str:
    """The byte order of the storages: little where the archive doesn't say."""
    entry = archive.by_name.get(f"{prefix}byteorder")
    order = "little" if entry is None else content(archive, entry).decode("ascii", "replace").strip()
    if order not in ("little", "big"):
        raise broken(archive.source, f"the byte order {order[:20]!r} is neither little nor big")
    return order


def content(archive: Archive, entry: Entry) -> bytes:
    """All bytes of a small entry."""
    where = f"{archive.source.path}: {entry.name[:80]}"
    if max(entry.size, entry.packed) > PICKLE_LIMIT:
        raise CheckpointError("pickle-too-big", f"{where}: {entry.size} bytes; the limit is {PICKLE_LIMIT}")
    if entry.method == STORED:
        return archive.source.read(archive.data_start(entry), entry.size)
    return inflated(archive, entry).read(0, entry.size)


def read_stream(archive: Archive, pickle: str, folder: str, order: str, name: str = "") -> Contents:
    """What the pickle stream in one entry describes, storages being the entries of `folder`.

    name: what all names begin with.
    """
    where = f"{archive.source.path}: {pickle[:80]}"
    entry = archive.by_name.get(pickle)
    if entry is None:
        raise broken(archive.source, f"the entry {pickle[:80]!r} is missing or there twice")
    value, machine = load(content(archive, entry), where)
    grown = PickledTree(value, where, machine.steps + SHARED_LIMIT, name)
    homes: dict[str, Home] = {}

    def home_of(storage: Storage) -> Home:
        found = homes.get(storage.key)
        if found is None:
            found = homes[storage.key] = _home(archive, f"{folder}{storage.key}", order)
        return found

    tensors = tuple(settle_tensor(name, stored, home_of, where) for name, stored in grown.tensors)
    return Contents(grown.root, tensors, globals_note(n for n in machine.globals.values() if not known(n)))


def _home(archive: Archive, name: str, order: str) -> Home:
    entry = archive.by_name.get(name)
    if entry is None:
        raise broken(archive.source, f"the entry {name[:80]!r}, which a tensor needs, is missing or there twice")
    start = archive.data_start(entry)
    if entry.method == STORED:
        return Home("", start, entry.size, order)
    inflated(archive, entry)
    return Home("", 0, entry.size, order, name)
