"""The formats by name, and which of them a file or directory is: told from its content, never from its extension."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.foreign import what
from flipper.checkpoints.source import Source
from flipper.errors import CheckpointError, UsageError

FILES: Final = {
    "safetensors": ("flipper.checkpoints.safetensors", "SafetensorsFile"),
    "torchscript": ("flipper.checkpoints.torchscript", "TorchScriptFile"),
    "pytorch": ("flipper.checkpoints.pytorch", "PyTorchFile"),
    "pytorch-legacy": ("flipper.checkpoints.pytorch_legacy", "LegacyFile"),
    "keras": ("flipper.checkpoints.keras", "KerasFile"),
    "hdf5": ("flipper.checkpoints.hdf5", "Hdf5File"),
}
"""Format of a single file -> module and class, in the order of sniffing; the module's sniff(source) decides."""

DIRECTORIES: Final = {
    "dcp": ("flipper.checkpoints.dcp", "DcpDirectory"),
    "sharded": ("flipper.checkpoints.sharded", "ShardedDirectory"),
}
"""Format of a directory -> module and class; the module's sniff(folder) decides."""


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: reads headers, never tensor data.

    Raises UsageError when the path doesn't exist, CheckpointError when it holds no readable checkpoint.
    """
    found = Path(path)
    if not found.exists():
        raise UsageError(f"{found} does not exist")
    if found.is_dir():
        return _open(found, found, DIRECTORIES)
    if not found.is_file():
        raise CheckpointError("unreadable", f"{found}: neither a file nor a directory")
    return _open(found, Source(found), FILES)


def _sniff(module: ModuleType, path: Path, probe: Path | Source) -> bool:
    try:
        return bool(module.sniff(probe))
    except OSError as error:
        raise CheckpointError("unreadable", f"{path}: {error.strerror}") from error


def _open(path: Path, probe: Path | Source, formats: dict[str, tuple[str, str]]) -> Checkpoint:
    for module_name, class_name in formats.values():
        module = import_module(module_name)
        if _sniff(module, path, probe):
            checkpoint: Checkpoint = getattr(module, class_name)(path)
            return checkpoint
    if isinstance(probe, Path):
        seen = "this directory is no checkpoint that flipper knows"
        known = "an index of shards (*.index.json), torch.distributed.checkpoint (.metadata)"
    else:
        told = what(probe)
        seen = "this file is " + ("no checkpoint that flipper knows" if told is None else told)
        known = "safetensors, PyTorch (zip, legacy, TorchScript), HDF5, Keras .keras"
    raise CheckpointError("foreign", f"{path}: {seen}; known: {known}")
