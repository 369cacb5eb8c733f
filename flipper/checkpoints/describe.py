"""Describe: one record a tensor, as `inspect` prints it, and statistics streamed over its values."""

from __future__ import annotations

from typing import Any

import numpy as np

from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.tensor import Tensor


def describe(checkpoint: Checkpoint, tensor: Tensor, statistics: bool = False) -> dict[str, Any]:
    """Name, role, dtype, shape and place of a tensor; with `statistics` also of its values."""
    place = tensor.place
    row: dict[str, Any] = {
        "name": tensor.name,
        "aliases": list(tensor.aliases),
        "layer": tensor.layer,
        "role": tensor.role,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "elements": tensor.elements,
        "bytes": tensor.nbytes,
        "file": place.file or (None if checkpoint.is_directory else checkpoint.path.name),
        "offset": place.offset,
        "storage": place.storage,
        "reason": place.reason,
    }
    if statistics:
        row.update(value_statistics(checkpoint, tensor) if tensor.supported else dict.fromkeys(_NAMES))
    return row


_NAMES = ("min", "max", "mean", "std", "zeros", "nans", "infs")


def value_statistics(checkpoint: Checkpoint, tensor: Tensor) -> dict[str, Any]:
    """min, max, mean and std of the finite values (None if there are none), counts of zeros, NaNs and infinities.

    Streamed; mean and variance are merged block by block (Chan, Golub, LeVeque 1979).
    """
    count, mean, squares = 0, 0.0, 0.0
    lows: list[Any] = []
    highs: list[Any] = []
    zeros = nans = infs = 0
    for bits in checkpoint.blocks(tensor):
        values = tensor.layout.decode(bits)
        zeros += int(np.count_nonzero(values == 0))
        finite = values[tensor.layout.is_finite(bits)]
        missing = int(np.count_nonzero(np.isnan(values))) if tensor.layout.real else 0
        nans += missing
        infs += len(values) - len(finite) - missing
        if not len(finite):
            continue
        lows.append(finite.min().item())
        highs.append(finite.max().item())
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = finite.astype(np.float64)
            block_mean = float(numbers.mean())
            delta, total = block_mean - mean, count + len(numbers)
            squares += float(((numbers - block_mean) ** 2).sum()) + delta * delta * count * len(numbers) / total
        mean, count = mean + delta * len(numbers) / total, total
    spread = {"mean": mean, "std": (squares / count) ** 0.5} if count else {"mean": None, "std": None}
    return {
        "min": min(lows, default=None), "max": max(highs, default=None), **spread,
        "zeros": zeros, "nans": nans, "infs": infs,
    }  # fmt: skip
