"""A campaign of made-up runs whose ranks die, in a folder: known losses and times, without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flipper.campaigns.cells import cells_of, trial_seed
from flipper.campaigns.folder import Campaign, settle
from flipper.campaigns.record import RunRecord
from flipper.campaigns.spec import spec_of
from flipper.campaigns.store import Store

CLEAN_SECONDS: Final = 4.0
"""Of every clean run."""

LOST: Final = {"restart": 0.0, "rollback": 0.0, "lossy": 0.02}
"""Accuracy that each recovery loses, in every trial alike."""

EXTRA: Final = {"restart": 3.0, "rollback": 0.4, "lossy": 0.2}
"""Seconds that it takes beyond a clean run; trial by trial a hundredth more."""


def made_up(
    folder: Path, trials: int = 12, layouts: Sequence[str] = ("ddp:4",), fails: str | None = None,
    done: int | None = None, **keys: Any,
) -> Campaign:  # fmt: skip
    """fails: a recovery whose first trial crashes. done: trials of a cell that have results, all without it.

    keys: more of [campaign].
    """
    table: dict[str, Any] = {
        "name": "deaths", "fault": "rank-loss", "recipe": "digits-mlp", "epochs": 2, "save_every": 8, "trials": trials,
        "tolerance": 0.01, **keys,
    }  # fmt: skip
    axes = {"parallel": list(layouts), "recovery": list(LOST), "step": ["1-10", "30-40"]}
    spec = spec_of({"campaign": table, "axes": axes})
    campaign = settle(spec, folder)
    evals = [(step, 0.2, 0.9) for step in (10, 20, 30, 40)]
    with Store(campaign.folder.results(), write=True) as store:
        for layout in layouts:
            for kind in ("golden", "control"):
                store.add(
                    RunRecord(
                        kind, layout, 1, fingerprint="f0", last_step=40, evals=evals, loss=0.2, metric=0.9,
                        max_abs_parameter=1.0, nonfinite=0, state_digest="s", resume_digest="r", seconds=CLEAN_SECONDS,
                    )
                )  # fmt: skip
        for cell in cells_of(spec):
            recovery, early = cell.axes["recovery"], cell.axes["step"] == "1-10"
            for number in range(trials if done is None else done):
                failed = recovery == fails and number == 0
                step = 5 if early else 35
                final = 0.9 - LOST[recovery]
                same = recovery == "restart"
                store.add(
                    RunRecord(
                        "trial", cell.parallel, 1, cell=cell.number, trial=number, fingerprint="f0",
                        seed=trial_seed(spec, cell, number), first_step=step - 1, last_step=step if failed else 40,
                        ended="crash" if failed else "completed", error="rank 1 died" if failed else None,
                        evals=[] if failed else [(s, 0.2, final if s == 40 else 0.9) for s in (10, 20, 30, 40)],
                        loss=None if failed else 0.2, metric=None if failed else final, max_abs_parameter=1.0,
                        state_digest="s" if same else f"s{number}", resume_digest="r" if same else f"r{number}",
                        deaths=[f"rank:{number % 4}@step:{step}:bucket:1"], lost=[(number % 4, step, 0.01)], struck=1,
                        recovery_seconds=0.1, steps_again=5 if same else int(recovery == "rollback"),
                        world_size=4 if same else 3, seconds=CLEAN_SECONDS + EXTRA[recovery] + 0.01 * number,
                    )
                )  # fmt: skip
        store.set_fact("seconds", 99.0)
    return campaign
