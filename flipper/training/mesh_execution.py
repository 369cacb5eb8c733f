"""Runs a mesh's schedule for real: one rank for each chip that lives, on this machine."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np

from flipper.errors import UsageError
from flipper.mesh.schedule import Schedule
from flipper.training.launch import run_ranks
from flipper.training.ranks import Emit, Place
from flipper.training.spec import Event

MOST: Final = 64
"""Ranks, at most: each is a process."""
LARGEST: Final = 1000
"""Of the whole numbers that are summed: float32 holds the sums of that many of up to this exactly, in any order."""


@dataclass(frozen=True)
class Execution:
    """What came of it. equal: whether all ranks ended with the same bits, of vectors whose sum depends on the order.
    exact: whether whole numbers were summed without error, on all ranks. seconds: of one allreduce, the shortest."""

    ranks: int
    elements: int
    equal: bool
    exact: bool
    seconds: float


def execute(schedule: Schedule, elements: int = 100_003, rounds: int = 3, timeout: float = 60.0) -> Execution:
    """Allreduce vectors of float32 by the schedule, over gloo. elements: of each vector.

    Raises UsageError for more than MOST chips, TrainingError when a rank fails.
    """
    ranks = len(schedule.mesh.survivors)
    if ranks > MOST:
        raise UsageError(f"--execute starts a process for each chip, at most {MOST} and not {ranks}: leave it out")
    heard: list[Event] = []
    body = functools.partial(_rank, schedule, elements, rounds)
    run_ranks(body, ranks, heard.append, timeout=timeout)
    result = heard[-1]
    return Execution(ranks, elements, result["equal"], result["exact"], result["seconds"])


def whole_numbers(rank: int, elements: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A rank's vector of whole numbers, [elements]."""
    drawn = np.random.default_rng((rank, 1)).integers(-LARGEST, LARGEST + 1, elements)
    return drawn.astype(np.float32)


def _rank(schedule: Schedule, elements: int, rounds: int, place: Place, emit: Emit) -> None:
    import hashlib
    import time

    import torch
    import torch.distributed as dist

    from flipper.training.parallel.routed import program, routed_sum

    mine = program(schedule, place.rank)
    whole = torch.from_numpy(whole_numbers(place.rank, elements))
    expected = sum((whole_numbers(rank, elements) for rank in range(place.world)), np.zeros(elements, np.float32))
    exact = bool(np.array_equal(routed_sum(whole, mine).numpy(), expected))
    vector = torch.from_numpy(np.random.default_rng((place.rank, 2)).standard_normal(elements).astype(np.float32))
    taken = []
    for _ in range(rounds):
        dist.barrier()
        began = time.monotonic()
        total = routed_sum(vector, mine)
        dist.barrier()
        taken.append(time.monotonic() - began)
    said: list[tuple[str, bool]] = [("", False)] * place.world
    dist.all_gather_object(said, (hashlib.sha256(total.numpy().tobytes()).hexdigest(), exact))
    if place.rank == 0:
        equal, all_exact = len({digest for digest, _ in said}) == 1, all(each for _, each in said)
        emit({"event": "executed", "equal": equal, "exact": all_exact, "seconds": min(taken)})
