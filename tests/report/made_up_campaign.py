"""A campaign of made-up runs in a folder: any number of trials, of any outcome, without training."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flipper.campaigns.cells import Cell, trial_seed
from flipper.campaigns.folder import Campaign, settle
from flipper.campaigns.record import RunRecord
from flipper.campaigns.spec import Spec, spec_of
from flipper.campaigns.store import Store

TENSORS: Final = ("model.conv1.weight", "model.conv2.weight", "model.conv10.weight", "model.fc.weight", "model.fc.bias")
BITS: Final = {"sign": (31, 31), "exponent": (23, 30), "mantissa": (0, 22)}
RESIDENT: Final = {"parameters": 320_832, "gradients": 320_832, "buffers": 3_200, "optimizer": 641_984}
ALL_BENIGN: Final = ("identical", "masked", "recovered")
ALL: Final = (*ALL_BENIGN, "degraded", "extreme", "non-finite", "hang", "crash", "refused")


def made_up(
    folder: Path,
    trials: int = 6,
    layouts: Sequence[str] = ("ddp:2", "pipeline:2"),
    seeds: Sequence[int] = (1, 2),
    counts: Sequence[int] = (1, 10),
    outcomes: Sequence[str] = ALL,
    tensors: Sequence[str] = TENSORS,
    steps: int = 20,
    done: int | None = None,
    name: str = "made-up",
    checkpoint: str | None = None,
    census: bool = False,
    **keys: Any,
) -> Campaign:
    """A campaign in a folder; `done` of the trials of each cell have results (None: all).

    checkpoint: the campaign is one of commands, named like the layouts, which resume from it. keys: more of [campaign].
    """
    table: dict[str, Any] = {"name": name, "null_trials": 8, "training_seeds": list(seeds), **keys}
    axes: dict[str, Any] = {
        "parallel": list(layouts), "bits": list(BITS), "role": "parameter", "count": list(counts),
    }  # fmt: skip
    document: dict[str, Any] = {"campaign": table, "axes": axes}
    if checkpoint is None:
        table |= {"recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2}
    else:
        (folder / checkpoint).parent.mkdir(parents=True, exist_ok=True)
        (folder / checkpoint).write_bytes(b"")
        axes["checkpoint"] = checkpoint
        document["commands"] = dict.fromkeys(layouts, "train {checkpoint} {metrics} {seed}")
    if "margin" not in keys:
        table["trials"] = "all" if census else max(trials, 1)
    spec = spec_of(document, folder)
    campaign = settle(spec, folder)
    chance = random.Random(7)
    resumed = campaign.cells[0].axes.get("checkpoint")
    with Store(campaign.folder.results(), write=True) as store:
        for layout in layouts:
            for seed in seeds:
                store.add(*(replace(run, checkpoint=resumed) for run in clean_runs(layout, seed, steps)))
        store.add(*(replace(run, checkpoint=resumed) for run in null_runs(spec, layouts, steps)))
        for cell in campaign.cells:
            numbers = range(trials if done is None else done)
            store.add(*(
                replace(struck(spec, cell, number, outcomes, tensors, steps, chance), checkpoint=resumed)
                for number in numbers
            ))  # fmt: skip
        store.set_fact("seconds", 12.5)
    return campaign


def clean_runs(layout: str, seed: int, steps: int) -> Iterator[RunRecord]:
    """A golden run and its control."""
    for kind, first in (("golden", 0), ("control", steps // 2)):
        yield RunRecord(
            kind, layout, seed, fingerprint="f0", first_step=first, last_step=steps, evals=curve(first, steps, 0.95),
            steps=[(step, 1.0 / step, 1.0) for step in range(first + 1, steps + 1)], loss=0.1, metric=0.95,
            max_abs_parameter=1.0, nonfinite=0, state_digest="s", resume_digest="r", resident=[RESIDENT] * 2,
            seconds=1.5,
        )  # fmt: skip


def null_runs(spec: Spec, layouts: Sequence[str], steps: int) -> Iterator[RunRecord]:
    """Clean runs that end a little worse."""
    for layout in layouts:
        for number in range(spec.null_trials):
            seed = spec.training_seeds[number % len(spec.training_seeds)]
            yield RunRecord(
                "null", layout, seed, trial=number, fingerprint="f0", first_step=steps // 2, last_step=steps,
                evals=curve(steps // 2, steps, 0.95 - 0.002 * number), loss=0.1, metric=0.95, max_abs_parameter=1.0,
            )  # fmt: skip


def curve(first: int, steps: int, best: float, dip: float = 0.0) -> list[tuple[int, float, float]]:
    """(step, loss, metric) at ten evaluations: towards `best`, `dip` below it on the way."""
    every = max(1, steps // 10)
    return [
        (step, 0.2, best - (dip if step < steps else 0.0) - 0.3 * math.exp(-6 * step / steps))
        for step in range(every, steps + 1, every)
        if step > first
    ]


def struck(
    spec: Spec, cell: Cell, number: int, outcomes: Sequence[str], tensors: Sequence[str], steps: int,
    chance: random.Random,
) -> RunRecord:  # fmt: skip
    """A trial; which outcome it has goes round, but most of those with few faults are masked."""
    wanted = outcomes[(number + cell.number) % len(outcomes)]
    count = int(cell.axes["count"])
    if count < 100 and chance.random() < 0.7 and "masked" in outcomes:
        wanted = "masked"
    first, half = steps // 2, steps // 2
    failed = wanted in ("hang", "crash", "refused")
    low, high = BITS[cell.axes["bits"]]
    final, dip = {"degraded": (0.4, 0.2), "recovered": (0.95, 0.3), "extreme": (0.1, 0.0)}.get(wanted, (0.95, 0.0))
    return RunRecord(
        "trial", cell.parallel, spec.training_seeds[number % len(spec.training_seeds)], cell=cell.number, trial=number,
        seed=trial_seed(spec, cell, number), fingerprint="f0", ended=wanted if failed else "completed",
        error=f"rank 1 ended: {wanted}" if failed else None, first_step=first, last_step=first if failed else steps,
        steps=[] if failed else [(first + i + 1, 0.1 + 0.001 * chance.random(), 1.0) for i in range(half)],
        evals=[] if failed else curve(first, steps, final, dip),
        replicas=[(first + i, 0.0 if wanted == "masked" else 1e-6 * 1.1**i) for i in range(0, half, 5)]
        if cell.parallel.startswith("ddp") and spec.probe_every
        else [],
        detected=[("nonfinite-loss", first + 2, 0)] if wanted == "non-finite" else [],
        loss=math.nan if wanted == "non-finite" else None if failed else 0.1, metric=None if failed else final,
        max_abs_parameter=1e12 if wanted == "extreme" else 1.0, nonfinite=0, state_distance=0.25,
        state_digest=f"s{number}", resume_digest="r" if wanted == "identical" else f"r{number}",
        faults=[
            (chance.choice(tensors), chance.randrange(5000), [chance.randint(low, high)], 0.25, 0.25 * 2.0**60)
            for _ in range(min(count, 1000))
        ],
        struck=count, resident=[RESIDENT] * 2, population=10_026 * (high - low + 1), plan=f"{cell.number}-{number}",
        seconds=0.5,
    )  # fmt: skip
