"""How far training has come: step, epoch, position in the epoch, and the seed that orders the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flipper.errors import MismatchError


@dataclass(frozen=True)
class Progress:
    """step: steps done since the beginning; epoch, batch: where the next step's data lies; seed: the run's."""

    step: int
    epoch: int
    batch: int
    seed: int

    def advance(self, batches: int) -> Progress:
        """After one more step, in epochs of so many batches."""
        batch = self.batch + 1
        whole = batch >= batches
        return replace(self, step=self.step + 1, epoch=self.epoch + whole, batch=0 if whole else batch)

    def to_state(self) -> dict[str, Tensor]:
        """As int64 scalars under their canonical names; the seed's 64 bits are reinterpreted as signed."""
        signed = self.seed - 2**64 if self.seed >= 2**63 else self.seed
        values = {"step": self.step, "epoch": self.epoch, "batch": self.batch, "seed": signed}
        return {f"progress.{key}": torch.tensor(value, dtype=torch.int64) for key, value in values.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], batches: int) -> Progress:
        """Read from a canonical state; MismatchError when it is missing or can't be."""
        values = {}
        for key in ("step", "epoch", "batch", "seed"):
            tensor = state.get(f"progress.{key}")
            if tensor is None or tensor.dtype != torch.int64 or tensor.dim():
                raise MismatchError(f"can't resume: progress.{key} is not an int64 scalar in the checkpoint")
            values[key] = int(tensor)
        progress = cls(values["step"], values["epoch"], values["batch"], values["seed"] % 2**64)
        if progress.step < 0 or progress.epoch < 0 or not 0 <= progress.batch < batches:
            raise MismatchError(
                f"can't resume: step {progress.step}, epoch {progress.epoch}, batch {progress.batch} "
                f"is no place in epochs of {batches} batches"
            )
        return progress
