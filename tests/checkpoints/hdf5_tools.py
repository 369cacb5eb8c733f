"""What the HDF5 tests share: strike elements through flipper, read everything back through h5py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from flipper.checkpoints import elements
from flipper.checkpoints.checkpoint import Checkpoint


def contents(file: Any) -> dict[str, bytes]:
    """The raw bytes of every dataset, in the file's own types, read by h5py. file: path or file object."""
    found: dict[str, bytes] = {}

    def visit(name: str, thing: Any) -> None:
        if (
            isinstance(thing, h5py.Dataset)
            and thing.shape is not None
            and thing.id.get_type().get_class() != h5py.h5t.STRING
        ):
            datatype = thing.id.get_type()
            data = np.zeros(thing.size * datatype.get_size(), np.uint8)
            if thing.size:
                thing.id.read(h5py.h5s.ALL, h5py.h5s.ALL, data, datatype)
            found[name] = data.tobytes()

    with h5py.File(file, "r") as opened:
        opened.visititems(visit)
    return found


def strike(checkpoint: Checkpoint, name: str, flat: list[int], xor: list[int], target: Path) -> None:
    """Copy the checkpoint to `target` and XOR elements of one tensor there, as an injection does."""
    shutil.copyfile(checkpoint.path, target)
    tensor = checkpoint.tensor(name)
    where, change = np.array(flat, np.int64), np.array(xor, np.uint64)
    if not tensor.place.patchable:
        checkpoint.rewrite(target, "", [(tensor, where, change)])
        return
    offsets, masks = [], []
    for part in tensor.place.locate(tensor.dims, tensor.layout, where):
        found = elements.byte_masks(part.offsets, change[part.where], tensor.layout, part.order, part.shifts)
        offsets.append(found[0])
        masks.append(found[1])
    struck = elements.combine(np.concatenate(offsets), np.concatenate(masks))
    further = checkpoint.checksum_masks("", *struck)
    data = bytearray(target.read_bytes())
    for positions, changes in (struck, further):
        for position, mask in zip(positions.tolist(), changes.tolist(), strict=True):
            data[position] ^= mask
    target.write_bytes(data)


def xored(data: bytes, itemsize: int, order: str, flat: list[int], xor: list[int]) -> bytes:
    """`data` with some of its elements (real numbers of `itemsize` bytes) XORed, one at a time."""
    changed = bytearray(data)
    for index, mask in zip(flat, xor, strict=True):
        place = slice(index * itemsize, (index + 1) * itemsize)
        value = int.from_bytes(changed[place], order) ^ mask  # type: ignore[arg-type]
        changed[place] = value.to_bytes(itemsize, order)  # type: ignore[arg-type]
    return bytes(changed)
