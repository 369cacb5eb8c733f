"""What a watched run (spec.Watch) tells: when its future is known, and how far from the golden run it ends."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from flipper.training.canonical import State
from flipper.training.saving import load
from flipper.training.ties import parameters_of

if TYPE_CHECKING:
    from flipper.training.parallel.layout import Layout


def all_nonfinite(layout: Layout) -> bool:
    """Whether no element of any parameter, on any rank, is finite; a collective."""
    mine = all(not bool(p.detach().isfinite().any()) for p in _local_parameters(layout))
    return all(layout.grid.everyone(mine))


def _local_parameters(layout: Layout) -> list[Tensor]:
    names = {f"model.{name}" for name in parameters_of(layout.module)}
    return [shard.tensor for name, shard in layout.live().items() if name in names]


def measure(state: State, parameters: frozenset[str], reference: Path | None) -> dict[str, object]:
    """What the last state is like, for the "end" event.

    parameters: their names without `model.`. max_abs_parameter: the largest magnitude among finite elements.
    nonfinite: elements of model and optimizer that aren't finite. state_distance: L2 distance from the reference's
    parameters and buffers, relative to their norm; None without a reference, NaN where something isn't finite.
    """
    nonfinite, largest = 0, 0.0
    for name, tensor in state.items():
        if not tensor.is_floating_point() or not tensor.numel() or not name.startswith(("model.", "optimizer.")):
            continue
        finite = tensor.isfinite()
        nonfinite += tensor.numel() - int(finite.sum())
        if name.removeprefix("model.") in parameters and bool(finite.any()):
            largest = max(largest, tensor[finite].abs().max().item())
    return {
        "max_abs_parameter": largest,
        "nonfinite": nonfinite,
        "state_distance": None if reference is None else distance(state, load(reference)),
    }


def resident_bits(layout: Layout) -> dict[str, int]:
    """What this rank keeps in memory from step to step, in bits: parameters, gradients, buffers, optimizer state.

    Activations and what libraries hold beside are not counted.
    """
    parameters = {f"model.{name}" for name in parameters_of(layout.module)}
    bits = dict.fromkeys(("parameters", "gradients", "buffers", "optimizer"), 0)
    for name, shard in layout.live().items():
        kind = "parameters" if name in parameters else "optimizer" if name.startswith("optimizer.") else "buffers"
        bits[kind] += shard.tensor.numel() * shard.tensor.element_size() * 8
    bits["gradients"] = bits["parameters"]
    return bits


def distance(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Relative L2 distance of a model's floating-point tensors from those of another state, reckoned in double."""
    apart = whole = 0.0
    for name, wanted in reference.items():
        if name.startswith("model.") and wanted.is_floating_point():
            there = wanted.double()
            apart += (state[name].double() - there).square().sum().item()
            whole += there.square().sum().item()
    return math.sqrt(apart / whole) if whole else math.sqrt(apart)


def joined_digest(parts: list[str]) -> str:
    """The digest over the digests of all ranks, in rank order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
