"""What the tests have ranks do; a module of its own, since ranks import it by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from flipper.errors import CheckpointError
from flipper.training.launch import Emit, Place
from flipper.training.spec import Parallel, TrainSpec


def report(place: Place, emit: Emit) -> None:
    import torch

    emit({"event": "here", "rank": place.rank, "pid": os.getpid(), "threads": torch.get_num_threads()})


def ordered_sums(place: Place, emit: Emit) -> None:
    """Sums of floats whose order matters, of a length that no number of ranks divides."""
    import torch

    from flipper.training.parallel.reduction import ordered_sum

    torch.manual_seed(place.rank)
    mine = torch.randn(1009) * 10.0 ** (torch.arange(1009) % 7)
    emit({"event": "sum", "rank": place.rank, "mine": mine.tolist(), "sum": ordered_sum(mine).tolist()})


def raise_on_rank_1(place: Place, emit: Emit) -> None:
    report(place, emit)
    if place.rank == 1:
        raise ZeroDivisionError("no\nsecond line")
    _wait_for_others()


def reject_on_all_ranks(place: Place, emit: Emit) -> None:
    raise CheckpointError("truncated", "seven bytes are missing")


def kill_rank_1(place: Place, emit: Emit) -> None:
    _signal_rank_1(place, emit, signal.SIGKILL)


def stop_rank_1(place: Place, emit: Emit) -> None:
    _signal_rank_1(place, emit, signal.SIGSTOP)


def _signal_rank_1(place: Place, emit: Emit, number: signal.Signals) -> None:
    report(place, emit)
    if place.rank == 1:
        os.kill(os.getpid(), number)
    _wait_for_others()


def chatter(place: Place, emit: Emit) -> None:
    print("noise on stdout")
    os.write(1, b"noise on fd 1\n")
    os.write(2, b"noise on fd 2\n")
    sys.stdout.flush()


def sleep_long(place: Place, emit: Emit) -> None:
    report(place, emit)
    time.sleep(600)


def _wait_for_others() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))


def train_each(specs: tuple[TrainSpec, ...], place: Place, emit: Emit) -> None:
    """Several runs, one after the other; every event tells by `run` whose it is."""
    from flipper.training.loop import train_rank

    for number, spec in enumerate(specs):
        train_rank(spec, place, lambda event, run=number: emit({**event, "run": run}))


def load_each(recipe: str, parallel: Parallel, files: tuple[Path, ...], place: Place, emit: Emit) -> None:
    """Load one checkpoint after the other into one layout; tell the digest of what is gathered from it."""
    from flipper.training import canonical, recipes, saving
    from flipper.training.parallel import set_up

    found = recipes.get(recipe)
    layout = set_up(parallel, found, place, found.data(None).train_features[: found.batch_size])
    for file in files:
        layout.load(saving.load(file))
        state = layout.gather()
        if place.rank == 0:
            emit({"event": "loaded", "digest": canonical.digest(state)})
