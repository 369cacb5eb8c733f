"""Everything random in a training run, as a function of its seed: initialisation, data order, dropout."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flipper.errors import MismatchError


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, by sha256, so that purposes don't share streams."""
    text = "\0".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@functools.lru_cache(maxsize=1)  # each step of an epoch asks for the same
def batch_order(seed: int, epoch: int, samples: int) -> Tensor:
    """The order in which an epoch visits the samples, (samples,) int64."""
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(samples, generator=generator)


def seed_rank(seed: int, stream: int, step: int) -> None:
    """Start this rank's generators at a step; dropout draws from them."""
    torch.manual_seed(derive(seed, "rank", stream, step))


def seed_libraries(seed: int, stream: int, step: int) -> None:
    """Start Python's and numpy's global generators, for recipes that draw from them, at each step: no state to keep."""
    number = derive(seed, "libraries", stream, step)
    random.seed(number)
    np.random.seed(number % 2**32)


def seed_recipe() -> None:
    """Start every global generator alike before a recipe's file is run and its data are made.

    So data that are split or made at random are the same on every rank, in every run, whatever its seed.
    """
    seed_libraries(0, 0, 0)
    torch.manual_seed(0)


def capture(rank: int, layout: str, device: torch.device) -> dict[str, Tensor]:
    """This rank's generator states, and which layout's rank it is, under their canonical names."""
    states = {f"rng.rank{rank}.cpu": torch.get_rng_state(), "rng.layout": _ascii(layout)}
    if device.type == "cuda":
        states[f"rng.rank{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def reinstate(state: Mapping[str, Tensor], rank: int, layout: str, device: torch.device) -> bool:
    """Set this rank's generators as a canonical state has them; False when they are those of another layout or device.

    Raises MismatchError for a state that torch doesn't take.

    Ranks of two layouts compute different things, so generators don't carry over; `seed_rank` then starts them anew.
    Nor do they from a CPU, where a GPU's has no state, to a GPU.
    """
    mine, there = _ascii(layout), state.get("rng.layout")
    names = [f"rng.rank{rank}.{kind}" for kind in dict.fromkeys(("cpu", device.type))]
    if there is None or not torch.equal(there, mine) or not all(name in state for name in names):
        return False
    name = names[0]
    try:
        torch.set_rng_state(state[name])
        if device.type == "cuda":
            name = names[1]
            torch.cuda.set_rng_state(state[name], device)
    except (RuntimeError, TypeError) as error:
        said = str(error).partition("\n")[0]
        raise MismatchError(f"can't resume: {name} is no generator's state: {said}") from error
    return True


def _ascii(text: str) -> Tensor:
    return torch.tensor(list(text.encode("ascii")), dtype=torch.uint8)
