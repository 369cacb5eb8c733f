"""sharded: Hugging Face directories: an index that names the shard of every tensor, or one checkpoint file alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flipper.bits.layout import Bits
from flipper.checkpoints.checkpoint import Checkpoint, Edit, Region
from flipper.checkpoints.elements import Bytes, Int
from flipper.checkpoints.formats import open_checkpoint
from flipper.checkpoints.source import Source
from flipper.checkpoints.tensor import Tensor
from flipper.checkpoints.ties import settle
from flipper.checkpoints.tree import Tree
from flipper.errors import CheckpointError

INDEX = re.compile(r".+\.(safetensors|bin)\.index(\.\w+)?\.json")
"""Names of indexes: model.safetensors.index.json, diffusion_pytorch_model.safetensors.index.fp16.json, ..."""

SINGLES = ("model.safetensors", "pytorch_model.bin")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".hdf5", ".keras")
"""Of files in a directory without an index that are tried as its only checkpoint."""

INDEX_LIMIT = 64 << 20
"""Bytes of an index."""


def sniff(folder: Path) -> bool:
    """Whether the directory has an index of shards, or files that could be its checkpoint."""
    return bool(_indexes(folder) or _candidates(folder))


class ShardedDirectory(Checkpoint):
    """A directory whose tensors lie in several files. shards: the checkpoint in each, by file name."""

    format = "sharded"

    def __init__(self, path: Path) -> None:
        owners = _owners(path)
        self.shards = _open_shards(path, sorted(set(owners.values())) if owners else [_single(path)])
        tensors: list[Tensor] = []
        recorded: dict[str, str] = {}
        notes: list[str] = []
        for file, shard in self.shards.items():
            for tensor in shard.tensors:
                tensors.append(tensor.located_in(file))
                recorded.update(dict.fromkeys(tensor.aliases, tensor.name))
            notes += [f"{file}: {note}" for note in shard.notes]
        _check_names(path, owners, self.shards)
        sources = {file: shard.sources[""] for file, shard in self.shards.items()}
        super().__init__(path, sources, settle(tensors, recorded))
        self.notes = tuple(notes)

    def tree(self) -> Tree:
        """That of the only file, or a flat dict of all tensors."""
        return next(iter(self.shards.values())).tree() if len(self.shards) == 1 else super().tree()

    def checksum_masks(self, file: str, offsets: Int, masks: Bytes) -> tuple[Int, Bytes]:
        """What the shard's own format asks for."""
        return self.shards[file].checksum_masks("", offsets, masks)

    def rewrite(
        self, target: Path, file: str, edits: Sequence[Edit], keep_checksums: bool = False
    ) -> tuple[Region, ...]:
        """Leave the edits of one shard to its own format."""
        shard = self.shards[file]
        mine = [(shard.tensor(tensor.name), flat, xor) for tensor, flat, xor in edits]
        return shard.rewrite(target, "", mine, keep_checksums)

    def problems(self) -> Iterator[str]:
        """What is wrong with each shard."""
        for shard in self.shards.values():
            yield from shard.problems()

    def _read_boxed(self, tensor: Tensor, flat: Int) -> Bits:
        shard = self.shards[tensor.place.file]
        return shard.read_bits(shard.tensor(tensor.name), flat)


def _indexes(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if INDEX.fullmatch(file.name) and file.is_file())


def _candidates(folder: Path) -> list[str]:
    """The files that could be the only checkpoint of a directory without an index."""
    known = [name for name in SINGLES if (folder / name).is_file()]
    return known or sorted(file.name for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())


def _single(path: Path) -> str:
    found = _candidates(path)
    if len(found) != 1:
        message = f"several files could be its checkpoint ({', '.join(found[:4])}); name one of them"
        raise CheckpointError("foreign", f"{path}: {message}")
    return found[0]


def _owners(path: Path) -> dict[str, str]:
    """Tensor name -> file, as the index says; empty where there is no index."""
    found = _indexes(path)
    if not found:
        return {}
    if len(found) > 1:
        raise CheckpointError("foreign", f"{path}: both {found[0]} and {found[1]} are there; keep one of them")
    index = Source(path / found[0])
    if index.size > INDEX_LIMIT:
        raise _broken(path, found[0], f"it has {index.size} bytes; the limit is {INDEX_LIMIT}")
    try:
        content: Any = json.loads(index.read(0, index.size).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _broken(path, found[0], f"it is not JSON ({str(error)[:80]})") from error
    owners = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(owners, dict) or not owners:
        raise _broken(path, found[0], "it has no weight_map")
    for name, file in owners.items():
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts or "\0" in file:
            raise _broken(path, found[0], f"{name[:80]!r} lies in {file!r:.80}, which is no file of the directory")
    return owners


def _broken(path: Path, index: str, rule: str) -> CheckpointError:
    return CheckpointError("header", f"{path / index}: {rule}")


def _open_shards(path: Path, files: Sequence[str]) -> dict[str, Checkpoint]:
    missing = [file for file in files if not os.path.isfile(path / file)]  # False, too, for names that no file can have
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError("missing-shard", f"{path}: its index names {missing[0]}{more}, which is not there")
    return {file: open_checkpoint(path / file) for file in files}


def _check_names(path: Path, owners: Mapping[str, str], shards: Mapping[str, Checkpoint]) -> None:
    """Every shard holds the tensors that the index says it does."""
    held = {file: {name for tensor in shard.tensors for name in tensor.names} for file, shard in shards.items()}
    lost = sorted(name for name, file in owners.items() if name not in held[file])
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        message = f"the index places {lost[0]} in {owners[lost[0]]}{more}, which does not hold it"
        raise CheckpointError("missing-shard", f"{path}: {message}")
