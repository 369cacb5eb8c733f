"""States: what a checkpoint that a run has written holds, whatever its container and its time stamps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flipper.bits.layout import Bits
from flipper.checkpoints import Checkpoint, Tensor, open_checkpoint


@dataclass(frozen=True)
class State:
    """What a checkpoint holds.

    digest: sha256 over its tensors (names, dtype, shape, values) in name order; the container doesn't count.
    max_abs_parameter: the largest magnitude among the finite elements of parameters, None without any. nonfinite:
    floating-point elements that aren't finite. distance: L2 distance of parameters and buffers from the reference's,
    relative to the norm of these; None without a reference or where names, dtypes and shapes differ.
    """

    digest: str
    max_abs_parameter: float | None
    nonfinite: int
    distance: float | None


def state_of(path: Path, reference: Path | None = None) -> State:
    """Read a checkpoint, streamed; raises CheckpointError where it can't be read, UsageError where there is none."""
    with open_checkpoint(path) as checkpoint:
        if reference is None:
            return _state(checkpoint, None)
        with open_checkpoint(reference) as other:
            return _state(checkpoint, other)


def _state(checkpoint: Checkpoint, reference: Checkpoint | None) -> State:
    digest, sums = hashlib.sha256(), _Sums()
    partners = {} if reference is None else {tensor.name: tensor for tensor in reference.tensors}
    comparable = reference is not None
    for tensor in checkpoint.tensors:
        digest.update(f"{tensor.names} {tensor.dtype} {tensor.shape} {tensor.supported}\n".encode())
        if not tensor.supported:
            continue
        usual: Iterator[Bits] | None = None
        if reference is not None and tensor.layout.real and tensor.role in ("parameter", "buffer"):
            partner = partners.get(tensor.name)
            comparable = comparable and partner is not None and _alike(tensor, partner)
            usual = reference.blocks(partner) if comparable and partner is not None else None
        for block in checkpoint.blocks(tensor):
            digest.update(block.astype(f"<{tensor.layout.word}").tobytes())
            if tensor.layout.real:
                sums.add(tensor, block, None if usual is None else next(usual))
    return State(digest.hexdigest(), sums.largest, sums.nonfinite, sums.distance if comparable else None)


def _alike(tensor: Tensor, other: Tensor) -> bool:
    return other.supported and (other.dtype, other.shape) == (tensor.dtype, tensor.shape)


@dataclass
class _Sums:
    """What is added up over the blocks of all floating-point tensors."""

    largest: float | None = None
    nonfinite: int = 0
    apart: float = 0.0
    whole: float = 0.0

    def add(self, tensor: Tensor, block: Bits, usual: Bits | None) -> None:
        """usual: the same elements of the reference, where they are compared."""
        values = tensor.layout.decode(block)
        finite = np.isfinite(values)
        self.nonfinite += int(values.size - np.count_nonzero(finite))
        if tensor.role == "parameter" and finite.any():
            self.largest = max(self.largest or 0.0, float(np.abs(values[finite]).max()))
        if usual is not None:
            there = tensor.layout.decode(usual)
            with np.errstate(over="ignore", invalid="ignore"):
                self.apart += float(np.square(values - there).sum())
                self.whole += float(np.square(there).sum())

    @property
    def distance(self) -> float:
        return math.sqrt(self.apart / self.whole) if self.whole else math.sqrt(self.apart)
