"""Writing a checkpoint anew in a format of choice; no torch needed."""

from __future__ import annotations

import os
from importlib import import_module

from flipper.checkpoints.output import atomic_output
from flipper.checkpoints.writers.contents import Contents, TensorData, contents_of
from flipper.errors import UsageError

FORMATS = ("safetensors", "pytorch", "hdf5")
"""The formats that can be written; `x` is the function `write` in flipper/checkpoints/writers/x.py."""

__all__ = ["FORMATS", "Contents", "TensorData", "contents_of", "write"]


def write(contents: Contents, path: str | os.PathLike[str], format: str, force: bool = False) -> None:
    """Write `contents` to the file `path`, which appears when it is whole.

    format: one of FORMATS. force: replace a file that is there.
    Raises UsageError when the format is unknown or can't hold the contents, OutputError when `path` can't be written.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    writer = import_module(f"flipper.checkpoints.writers.{format}")
    with atomic_output(path, force) as temporary:
        writer.write(contents, temporary)
