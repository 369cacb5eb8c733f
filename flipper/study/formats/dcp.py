"""torch.distributed.checkpoint: each rank writes and reads what it holds; its own files, or files of safetensors."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader

from flipper.errors import UsageError
from flipper.study.formats.format import Pending, Shards
from flipper.training.dcp import SavePlanner, ShardLoader, Writer
from flipper.training.parallel.grid import Grid


class Dcp:
    """Directories with `.metadata`."""

    def __init__(self) -> None:
        self._background: dist.ProcessGroup | None = None

    def prepare(self, grid: Grid) -> None:
        if self._background is None:  # a save that goes on must not talk among the messages of training
            self._background = dist.new_group(backend="gloo")

    def save(self, shards: Shards, grid: Grid, path: Path, fsync: bool) -> None:
        state_dict_saver.save(_tensors(shards), storage_writer=_writer(path, fsync), planner=SavePlanner(shards, {}))

    def save_async(self, shards: Shards, grid: Grid, path: Path, fsync: bool) -> Pending:
        pending: Any = state_dict_saver.async_save(
            _tensors(shards),
            storage_writer=_writer(path, fsync),
            planner=SavePlanner(shards, {}),
            process_group=self._background,
        )
        saved: Pending = getattr(pending, "upload_completion", pending)  # the future itself, where staging is done
        return saved

    def load(self, shards: Shards, grid: Grid, path: Path) -> None:
        state_dict_loader.load(_tensors(shards), storage_reader=FileSystemReader(path), planner=ShardLoader(shards))


class SafetensorsShards:
    """Directories of a file of safetensors a rank, whose header says which parts of the tensors it has."""

    def prepare(self, grid: Grid) -> None:
        try:
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

            del HuggingFaceStorageReader
            known = "save_distributed" in signature(HuggingFaceStorageWriter).parameters
        except ImportError:
            known = False
        if not known:
            raise UsageError(
                f"--formats safetensors-sharded needs a newer torch: {torch.__version__} writes no such shards"
            )

    def save(self, shards: Shards, grid: Grid, path: Path, fsync: bool) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
        writer.sync_files = fsync
        state_dict_saver.save(_tensors(shards), storage_writer=writer, planner=SavePlanner(shards, {}))

    def load(self, shards: Shards, grid: Grid, path: Path) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        state_dict_loader.load(
            _tensors(shards), storage_reader=HuggingFaceStorageReader(str(path)), planner=ShardLoader(shards)
        )


def _tensors(shards: Shards) -> dict[str, torch.Tensor]:
    return {name: shard.tensor for name, shard in shards.items()}


def _writer(path: Path, fsync: bool) -> Writer:
    return Writer(path, fsync, {}, {})


DCP: Final = Dcp()
SAFETENSORS: Final = SafetensorsShards()
