"""Everything random in a training run, as a function of its seed: initialisation, data order, dropout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, by sha256, so that purposes don't share streams."""
    text = "\0".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def batch_order(seed: int, epoch: int, samples: int) -> Tensor:
    """The order in which an epoch visits the samples, (samples,) int64."""
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(samples, generator=generator)


def seed_rank(seed: int, rank: int) -> None:
    """Start this rank's generators; dropout draws from them."""
    torch.manual_seed(derive(seed, "rank", rank))


def capture(rank: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's generator states, under their canonical names."""
    states = {f"rng.rank{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.rank{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def reinstate(state: Mapping[str, Tensor], seed: int, rank: int, device: torch.device) -> None:
    """Set this rank's generators as a canonical state has them; a rank that it lacks starts from the seed."""
    seed_rank(seed, rank)
    if f"rng.rank{rank}.cpu" in state:
        torch.set_rng_state(state[f"rng.rank{rank}.cpu"])
    if f"rng.rank{rank}.cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state[f"rng.rank{rank}.cuda"], device)
