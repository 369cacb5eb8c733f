"""Shards as torch.distributed.checkpoint saves and loads them: each rank its own, under names that need no layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from flipper.errors import MismatchError, OutputError
from flipper.training.parallel.shards import Shard

Keys = tuple[str, ...]


def write(
    shards: Mapping[str, Shard],
    path: Path,
    target: Path,
    ties: Mapping[str, str],
    keys: Mapping[str, Keys],
    alone: bool = False,
) -> None:
    """Write the shards of all ranks to the directory `path`; a collective, unless one rank writes alone.

    target: what the directory is to become, for messages. ties, keys: as of Writer; the same on every rank.
    Raises OutputError, on every rank, when one can't write.
    """
    tensors = {name: shard.tensor for name, shard in shards.items()}
    try:
        state_dict_saver.save(
            tensors, storage_writer=Writer(path, False, ties, keys), planner=SavePlanner(shards, keys), no_dist=alone
        )
    except CheckpointException as error:
        where = "" if alone else f"rank {min(error.failures)}: "
        raise OutputError(f"{target} can't be written: {where}{reason(error)}") from error


def reason(error: BaseException) -> str:
    """Why something couldn't be written, in one line; torch's writers hide the system's words, or have none."""
    if isinstance(error, CheckpointException):
        error = error.failures[min(error.failures)][0]
    if told := re.search(r"error message = '([^']*)'", str(error)):  # of HDF5
        return told[1]
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    said = str(error).strip().partition("\n")[0]
    return "the system took less than was written" if "inline_container" in said else said or type(error).__name__


class SavePlanner(DefaultSavePlanner):
    """Plans to save this rank's shards; the state_dict beside it has their tensors, by the same names."""

    def __init__(self, shards: Mapping[str, Shard], keys: Mapping[str, Keys]) -> None:
        """keys: of names: where in nested dicts a reader without flipper finds them."""
        super().__init__()
        self._shards, self._keys = shards, keys

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = [_written(name, shard) for name, shard in self._shards.items() if _holds(shard)]
        self.plan = SavePlan(items, planner_data={name: self._keys.get(name, (name,)) for name in self._shards})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        tensor: Tensor = self.state_dict[write_item.index.fqn]
        return tensor.detach()


def _holds(shard: Shard) -> bool:
    """Whether there is anything to write: of a tensor without elements, the whole."""
    return shard.tensor.numel() > 0 or shard.tensor.shape == shard.shape


def _written(name: str, shard: Shard) -> WriteItem:
    starts = torch.Size(shard.starts)
    return WriteItem(
        MetadataIndex(name, starts),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(starts, shard.tensor.shape),
            properties=TensorProperties.create_from_tensor(shard.tensor),
            size=torch.Size(shard.shape),
        ),
    )


class Writer(FileSystemWriter):
    """Writes a directory; names that are tied to others share their bytes in it.

    fsync: whether it waits until files are on the disk. ties: further name -> name that is saved, and its keys.
    """

    def __init__(self, path: Path, fsync: bool, ties: Mapping[str, str], keys: Mapping[str, Keys]) -> None:
        super().__init__(path, sync_files=fsync)
        self._ties, self._keys = ties, keys

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [each for rank in results for each in rank]
        for alias, name in self._ties.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            metadata.planner_data[alias] = self._keys.get(alias, (alias,))
            same = [each for each in written if each.index.fqn == name]
            results.append([replace(each, index=replace(each.index, fqn=alias)) for each in same])
        super().finish(metadata, results)

    def storage_meta(self) -> StorageMeta:
        """Without the path, which is a temporary one, and a random number: equal states, equal bytes."""
        return StorageMeta()


class ShardLoader(LoadPlanner):
    """Plans to fill this rank's shards from a checkpoint of any layout.

    Raises MismatchError for a tensor that isn't there, or has another shape.
    """

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._shards = shards

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, shard in self._shards.items():
            if shard.tensor.numel():
                chunk = ChunkStorageMetadata(torch.Size(shard.starts), shard.tensor.shape)
                items += create_read_items_for_chunk_list(name, self._stored(name, shard), [chunk])
        return LoadPlan(items)

    def _stored(self, name: str, shard: Shard) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata) or stored.size != shard.shape:
            seen = "is not in it" if stored is None else f"is {list(getattr(stored, 'size', ()))}"
            raise MismatchError(f"not a checkpoint of this state: {name} {seen}, not {list(shard.shape)}")
        return stored

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise TypeError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._shards[read_item.dest_index.fqn].tensor
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # it is a view of the shard
