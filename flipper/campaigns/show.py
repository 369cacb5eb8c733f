"""show: the plan of a campaign before it runs: cells, trials, margins, and the hours that two timed trials promise."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from flipper.campaigns.cells import Cell, effective_reach, null_starts, start_of, starts
from flipper.campaigns.contrast import contrast_of, question
from flipper.campaigns.folder import Campaign, Folder
from flipper.campaigns.runner import run_golden, run_trial, runner_of
from flipper.campaigns.spec import Spec
from flipper.statistics.intervals import wilson
from flipper.statistics.sample_size import margin_reached


def plan_rows(campaign: Campaign) -> list[dict[str, Any]]:
    """One row a cell: its axes, its trials, and the half width that its interval will have at worst (a share of 0.5).

    A cell whose reach makes no difference takes its results from the one that it equals.
    """
    spec, found = campaign.spec, []
    axes = tuple(dict.fromkeys(axis for cell in campaign.cells for axis in cell.axes))
    for cell in campaign.cells:
        trials: int | str = "all" if spec.census else cell.trials
        margin = 0.0 if spec.census else wilson(cell.trials / 2, cell.trials, spec.confidence).half_width
        if spec.margin is not None:
            from flipper.campaigns.stopping import plan_for

            plan = plan_for(spec)
            trials, margin = f"{plan.looks[0]} to {plan.maximum}", spec.margin
        row: dict[str, Any] = {"cell": cell.number, **{axis: cell.axes.get(axis) for axis in axes}}
        if "reach" in cell.axes and spec.recipe:
            row["reach"] = effective_reach(cell.parallel, cell.reach)
        found.append({**row, "trials": trials, "margin": margin})
    return found


def overview(campaign: Campaign) -> dict[str, Any]:
    """The campaign in a few numbers."""
    spec = campaign.spec
    nulls = null_starts(spec, campaign.cells) if spec.tolerance is None else []
    total = sum(cell.trials for cell in campaign.cells)
    main = contrast_of(spec, campaign.cells)
    shared = _paired(campaign.cells, question(spec), main)
    return {
        "name": spec.name,
        "cells": len(campaign.cells),
        "trials": total if spec.margin is None and not spec.census else None,
        "golden_and_control_runs": 2 * len(starts(spec, campaign.cells)),
        "null_trials": spec.null_trials * len(nulls),
        "contrast": None if main is None else " against ".join(main),
        "pairs": shared,
        "pairs_margin": margin_reached(10**9, shared, spec.confidence) if shared else None,
    }


def _paired(cells: tuple[Cell, ...], axis: str, main: tuple[str, str] | None) -> int:
    """Pairs of trials of the primary question, which compares two values of an axis."""
    if main is None:
        return 0
    a, b = ({cell.without(axis): cell.trials for cell in cells if cell.axes[axis] == name} for name in main)
    return sum(min(trials, b[key]) for key, trials in a.items() if key in b)


def timed(campaign: Campaign) -> dict[str, Any]:
    """The hours that the campaign will take here, from golden runs and two trials that are made for it and thrown away.

    The two are of the layouts of the primary question; other layouts count as the slower of them. Trials are taken to
    run one after the other, as those that fill the processors do; with a margin, the most that it may take.
    """
    spec = campaign.spec
    with tempfile.TemporaryDirectory(prefix="flipper-show-") as folder:
        trying = replace(campaign, folder=Folder(Path(folder)))
        seconds = {cell.parallel: _timed(trying, cell) for cell in _two(spec, campaign.cells)}
        slowest = tuple(map(max, zip(*seconds.values(), strict=True)))
        trials = {cell.number: _most_trials(trying, cell) for cell in campaign.cells}
    total = sum(seconds.get(start.parallel, slowest)[0] for start in starts(spec, campaign.cells))
    total += sum(trials[cell.number] * seconds.get(cell.parallel, slowest)[1] for cell in campaign.cells)
    for alike in null_starts(spec, campaign.cells) if spec.tolerance is None else ():
        total += spec.null_trials * seconds.get(alike[0].parallel, slowest)[1]
    return {
        "timed_seconds": {name: round(trial, 3) for name, (_, trial) in seconds.items()},
        "expected_hours": round(total / 3600, 3),
    }


def _most_trials(campaign: Campaign, cell: Cell) -> int:
    """How many trials a cell may take; of a census, the bits of a checkpoint that has been made for the timing."""
    spec = campaign.spec
    if spec.margin is not None:
        from flipper.campaigns.stopping import plan_for

        return plan_for(spec).maximum
    if not spec.census:
        return cell.trials
    from flipper.campaigns.census import bits_of

    start = start_of(spec, _two(spec, campaign.cells)[0], 0)
    golden, _ = run_golden(campaign, start)
    return bits_of(runner_of(spec).clean_of(campaign, start, golden), cell.model)


def _two(spec: Spec, cells: tuple[Cell, ...]) -> list[Cell]:
    """A cell of each layout of the primary question, else of the first and the last layout."""
    pair = contrast_of(spec, cells) if question(spec) == "parallel" else None
    names = pair or (cells[0].parallel, cells[-1].parallel)
    return [next(cell for cell in cells if cell.parallel == name) for name in dict.fromkeys(names)]


def _timed(campaign: Campaign, cell: Cell) -> tuple[float, float]:
    """Seconds of a golden run with its control, and of a trial."""
    began = time.monotonic()
    run_golden(campaign, start_of(campaign.spec, cell, 0))
    middle = time.monotonic()
    run_trial(campaign, cell, 0)
    return middle - began, time.monotonic() - middle
