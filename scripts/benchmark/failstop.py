"""The benchmark's parts on ranks that die: the own reducer, snapshots, recoveries, MPI, and the simulator."""

import os
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from measure import Row, show, skipped, work

RECIPE = "mnist5k-cnn"


def reducer(folder: Path, rounds: int, count: int) -> None:
    """A step by the bucketed reducer, by turns with one by DistributedDataParallel and the same allreduce.

    Its gain is what a rank does while it would wait for others. Where ranks share processors nobody's waiting is free,
    and its further messages only cost: no limit is set there.
    """
    for ranks in (2, 4):
        layout, limit = f"ddp:{ranks}", 1.0 if ranks <= (os.cpu_count() or 1) else None
        own, ddp = [], []
        for _ in range(rounds):
            ddp.append(work("steps", RECIPE, layout, "ordered", count))
            own.append(work("own_steps", RECIPE, layout, "lossy", count))
        name, other = f"a step of {RECIPE}, {layout}, own reducer", "DDP, --allreduce ordered"
        show([Row(name, median(own), other, median(ddp), limit)])
    step = work("own_steps", RECIPE, "ddp:2", "rollback", count)
    show([Row("rollback's snapshot", work("snapshots", RECIPE, 200), "step, ddp:2, rollback", step, 0.03)])


def recoveries(folder: Path, rounds: int) -> None:
    """From a death to the next step that was not completed before, of four ranks, by turns.

    A restart makes the steps since its checkpoint again. Here the death comes halfway between two, their interval being
    the one for a failure a minute; and, without a limit, in the very step after a checkpoint.
    """
    layout, warm = "ddp:4", 9
    every = work("chosen_interval", layout, 60)
    halfway = f"restart, {every} steps between checkpoints", "restart", max(every, warm), max(1, every // 2)
    at_once = "restart, nothing to do again", "restart", warm, 1
    others = {recovery: [] for recovery in ("rollback", "lossy")}
    restarts = {name: [] for name, *_ in (halfway, at_once)}
    for _ in range(rounds):
        for name, *settings in (halfway, at_once):
            restarts[name].append(work("death", layout, *settings))
        for recovery, seconds in others.items():
            seconds.append(work("death", layout, recovery, warm, 1))
    show([
        Row(f"death to next step, digits-cnn, {layout}, {recovery}", median(seconds), name, median(against), limit)
        for recovery, seconds in others.items()
        for (name, against), limit in zip(restarts.items(), (0.1, None), strict=True)
    ])  # fmt: skip
    if find_spec("mpi4py") is None:
        skipped("MPI shrinks a communicator of three", "mpi4py is not installed")
    else:
        show([Row("MPI shrinks a communicator of three, one dead", work("shrinks", rounds), "limit", 0.1, None)])


def simulator(folder: Path, count: int) -> None:
    """Steps of many workers at once; memory must not grow with them."""
    (few, small), (many, large) = (work("simulated", workers, count) for workers in (64, 1024))
    show([
        Row("simulator, batched, 1,024 workers, one step", many, "limit", 1 / 200),
        Row("simulator, batched, 64 workers, one step", few, "limit", 1 / 200),
        Row("simulator, peak memory, 1,024 workers", large, "64 workers", small, 1.05, unit="MB"),
    ])  # fmt: skip
