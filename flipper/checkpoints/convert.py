"""Convert a checkpoint to another format without loss."""

from __future__ import annotations

import os
from typing import Any

from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.views import overlapping
from flipper.checkpoints.writers import contents_of, write


def convert(
    checkpoint: Checkpoint, output: str | os.PathLike[str], to: str, force: bool = False, drop: bool = False
) -> dict[str, Any]:
    """Write all tensors, names, ties, nesting and scalars of `checkpoint` to the file `output` in the format `to`.

    to: safetensors, pytorch or hdf5. Strided tensors become row-major, big-endian ones little-endian. Tied names stay
    tied; views that overlap otherwise become tensors of their own, which the record lists as `unfolded`. Whether
    autograd tracks a tensor is carried for parameters; it tracks no plain tensor that comes out.
    force: replace a file that is there. drop: leave out what can't be carried (objects of foreign classes, tensors
    without plain numbers) instead of raising UsageError.
    Returns the record that `flipper convert` prints. Raises UsageError for what the format can't hold, OutputError.
    """
    contents = contents_of(checkpoint, drop)
    carried = [tensor for tensor in checkpoint.tensors if tensor.name in contents.tensors]
    write(contents, output, to, force)
    return {
        "output": os.fspath(output),
        "format": to,
        "source_format": checkpoint.format,
        "tensors": len(contents.tensors),
        "aliases": len(contents.aliases),
        "bytes": os.stat(output).st_size,
        "dropped": list(contents.dropped),
        "unfolded": overlapping(carried),
    }
