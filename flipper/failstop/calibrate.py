"""Calibration: what the parts of a step and of a recovery take on this machine, measured for the cost model."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flipper.failstop.costs import Costs
from flipper.failstop.kills import Kill
from flipper.failstop.run import train_through
from flipper.failstop.spec import FailstopSpec
from flipper.training.launch import run_ranks
from flipper.training.layouts import SINGLE, Parallel
from flipper.training.ranks import Emit, Place
from flipper.training.spec import Event, TrainSpec

REPEATS: Final = 9
DEATHS: Final = 3
SMALL, LARGE = 1 << 10, 1 << 24
"""Bytes of the two messages that latency and bandwidth are taken from."""
RANKS: Final = 3
"""Of the runs in which one dies."""


def calibrated(train: TrainSpec) -> Costs:
    """Medians on this machine, of this recipe; takes some seconds."""
    measured: dict[str, float] = {}

    def hear(event: Event) -> None:
        measured.update({name: value for name, value in event.items() if name != "event"})

    alone = replace(train, parallel=SINGLE, resume=None)
    run_ranks(functools.partial(_alone, alone), 1, hear, device=train.device)
    run_ranks(_together, 2, hear, device=train.device)
    measured |= _recoveries(alone)
    return Costs(**measured)


def _recoveries(train: TrainSpec) -> dict[str, float]:
    """Detection and regrouping from ranks that are killed, respawning from a run that is restarted."""
    found: dict[str, list[float]] = {"detect": [], "regroup": [], "respawn": []}

    def hear(event: Event) -> None:
        if event["event"] == "rank-lost":
            found["detect"].append(event["seconds_to_detect"])
        elif event["event"] == "recovered":
            found["respawn" if event["strategy"] == "restart" else "regroup"].append(event["seconds"])

    for recovery in ("lossy", "restart"):
        for _ in range(DEATHS):
            with tempfile.TemporaryDirectory(prefix="flipper-calibrate-") as folder:
                spec = replace(
                    train, parallel=Parallel("ddp", RANKS), steps=3, epochs=None, save=Path(folder) / "saved",
                    save_every=1,
                )  # fmt: skip
                train_through(FailstopSpec(spec, (Kill(1, step=2, bucket=0),), recovery), hear)
    return {name: statistics.median(values) for name, values in found.items()}


def _alone(train: TrainSpec, place: Place, emit: Emit) -> None:
    """Computation, snapshots and checkpoints of one rank."""
    import torch

    from flipper.failstop.snapshot import Snapshot
    from flipper.failstop.workers import Rules, Workers
    from flipper.training import loop, saving

    run = loop.begin(train, place, emit)
    workers = Workers(run, 2, Rules("rollback"), exact=True)
    few = torch.arange(min(8, len(run.data.train_targets)))
    many = torch.arange(min(8 * run.recipe.batch_size, len(run.data.train_targets)))
    workers.step()
    short, long = (_median(functools.partial(workers.backward, each)) for each in (few, many))
    sample = max(0.0, long - short) / max(len(many) - len(few), 1)
    snapshot = Snapshot(run.layout.module, run.layout.optimizer, whole=True)
    emit({"event": "measured", "step": max(0.0, long - sample * len(many)), "sample": sample,
          "snapshot": _median(snapshot.take)})  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="flipper-calibrate-") as folder:
        paths = iter(Path(folder) / f"{number}.safetensors" for number in range(REPEATS + 1))
        state = run.layout.gather()
        write = _median(lambda: saving.save({**state, **run.progress.to_state()}, next(paths), "safetensors"))
        read = _median(lambda: saving.load(Path(folder) / "0.safetensors"))
    emit({"event": "measured", "write": write, "read": read})


def _together(place: Place, emit: Emit) -> None:
    """An allreduce of two sizes between two ranks."""
    import torch

    from flipper.training.parallel.reduction import ordered_sum

    times = {}
    for size in (SMALL, LARGE):
        values = torch.ones(size // 4)
        times[size] = _median(functools.partial(ordered_sum, values))  # of two ranks, it is one message
    if place.rank == 0:
        bandwidth = (LARGE - SMALL) / max(times[LARGE] - times[SMALL], 1e-9)
        emit({"event": "measured", "latency": times[SMALL], "bandwidth": bandwidth})


def _median(work: Callable[[], Any]) -> float:
    """Seconds that a call takes, after one that isn't counted."""
    work()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
