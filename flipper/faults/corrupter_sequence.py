"""Sequences that hdf5_corrupter saved: {location: [[indexes, bits], ...]}, bit 0 the most significant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.tensor import Tensor
from flipper.errors import MismatchError, UsageError


def sequence_faults(sequence: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[tuple[str, int, int]]:
    """Tensor, flat index and XOR mask of each entry; null bits (attempts that its probability turned down) give none.

    Raises UsageError for entries without indexes, which have no place to strike, and for what isn't such a sequence;
    MismatchError where indexes or bits lie outside the checkpoint's tensor.
    """
    for location, entries in sequence.items():
        tensor = checkpoint.tensor(location.strip("/"))
        if not isinstance(entries, list):
            raise UsageError(f"{location}: its entries are no list; a sequence is {{location: [[indexes, bits], ...]}}")
        for number, entry in enumerate(entries):
            if not isinstance(entry, list) or len(entry) != 2:
                raise UsageError(f"{location}: entry {number} is not [indexes, bits]")
            indexes, bits = entry
            positions = [bit for bit in (bits if isinstance(bits, list) else [bits]) if bit is not None]
            if not positions:
                continue
            if indexes == []:
                raise UsageError(f"{location}: entry {number} has no indexes, so no place to strike; save them")
            yield tensor.name, _flat(tensor, indexes, number), _mask(tensor, positions, number)


def _flat(tensor: Tensor, indexes: Any, number: int) -> int:
    shape = tensor.dims or (1,)
    naturals = isinstance(indexes, list) and all(type(index) is int and index >= 0 for index in indexes)
    if not naturals or len(indexes) != len(shape) or any(i >= size for i, size in zip(indexes, shape, strict=True)):
        raise MismatchError(f"{tensor.name}: entry {number} has the indexes {indexes}, the shape is {list(shape)}")
    return int(np.ravel_multi_index(tuple(indexes), shape))


def _mask(tensor: Tensor, positions: list[Any], number: int) -> int:
    """Bits that are named twice are flipped back, as that tool does with long bursts."""
    width = tensor.layout.width
    mask = 0
    for position in positions:
        if type(position) is not int or not 0 <= position < width:
            raise MismatchError(f"{tensor.name}: entry {number} names bit {position}; {tensor.dtype} has {width}")
        mask ^= 1 << (width - 1 - position)
    return mask
