"""Recoveries: what each costs where ranks die, in accuracy and in time, and how they differ pair by pair.

Times depend on what else the machine does meanwhile; all else does not.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from flipper.campaigns.cells import Cell
from flipper.campaigns.contrast import Match, matched
from flipper.campaigns.deaths import POINT
from flipper.campaigns.results import DEATH_MEASURES, Results, Trial, measured
from flipper.statistics.multiple import holm
from flipper.statistics.paired_means import mean_of, sign_flip

AVERAGED: Final = DEATH_MEASURES[1:]
"""What is measured of a trial and averaged over several."""

COMPARED: Final = ("accuracy_loss", "overhead_fraction")
"""Those in which strategies are compared pair by pair."""


def strategies(results: Results) -> list[dict[str, Any]]:
    """Each recovery in each setting, over all its trials: who came to harm, and means of what was measured."""
    return [
        {"setting": setting, "recovery": recovery,
         **averages(results, [trial for cell in cells for trial in results.by_cell[cell.number]])}
        for setting, recoveries in settings(results)
        for recovery, cells in recoveries.items()
    ]  # fmt: skip


def settings(results: Results) -> list[tuple[dict[str, Any], dict[str, list[Cell]]]]:
    """The cells of each recovery, by all axes but the recovery and the point of the deaths, over which is averaged."""
    found: dict[str, tuple[dict[str, Any], dict[str, list[Cell]]]] = {}
    for cell in results.campaign.cells if results.lose_ranks else ():
        key = cell.without("recovery", *POINT)
        setting = {axis: value for axis, value in cell.axes.items() if axis not in ("recovery", *POINT)}
        found.setdefault(key, (setting, {}))[1].setdefault(cell.axes["recovery"], []).append(cell)
    return list(found.values())


def averages(results: Results, trials: Sequence[Trial]) -> dict[str, Any]:
    """Trials, those that lost a rank, harmful and identical ones; and each measure's mean with its interval."""
    rows = [measured(results, trial) for trial in trials]
    outcomes = Counter(trial.judgement.outcome for trial in trials)
    return {
        "trials": len(trials),
        "with_deaths": sum(bool(trial.run.lost) for trial in trials),
        "ranks_lost": sum(len(trial.run.lost) for trial in trials),
        "identical": outcomes["identical"],
        "harmful": sum(trial.harmful for trial in trials),
        "failed": sum(trial.run.failed for trial in trials),
        **{name: _mean([row[name] for row in rows], results.campaign.spec.confidence) for name in AVERAGED},
    }


def _mean(values: Iterable[float | None], confidence: float) -> dict[str, Any]:
    found = mean_of([value for value in values if value is not None], confidence)
    interval = found.interval
    return {
        "count": found.count,
        "mean": found.mean,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
    }


def differences(results: Results) -> list[dict[str, Any]]:
    """Every two recoveries, in each setting, in accuracy loss and in overhead.

    The mean difference of pairs of trials with the same deaths, its interval, the sign-flip test over draws, and Holm's
    correction over all of one measure: what is said of accuracy must not hang on times.
    """
    found = []
    for measure in COMPARED:
        here = []
        for setting, recoveries in settings(results):
            for (a, left), (b, right) in itertools.combinations(recoveries.items(), 2):
                compared = _compared(results, matched("recovery", results, left, right), measure)
                if compared["draws"]:
                    here.append({"setting": setting, "a": a, "b": b, "measure": measure, **compared})
        found += [each | {"p_holm": p} for each, p in zip(here, holm([each["p"] for each in here]), strict=True)]
    return found


def _compared(results: Results, matches: Sequence[Match], measure: str) -> dict[str, Any]:
    """Pairs that share a draw count once, by their mean: they are not independent."""
    draws: dict[Any, list[float]] = defaultdict(list)
    for a, b in matches:
        one, other = measured(results, a)[measure], measured(results, b)[measure]
        if one is not None and other is not None:
            draws[a.run.seed].append(one - other)
    apart = [sum(each) / len(each) for each in draws.values()]
    found = mean_of(apart, results.campaign.spec.confidence)
    interval = found.interval
    return {
        "pairs": sum(map(len, draws.values())),
        "draws": len(apart),
        "difference": found.mean,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "p": sign_flip(apart),
    }


def death_limits(results: Results) -> list[str]:
    """What a campaign whose ranks die does not show, in words."""
    spec, cells = results.campaign.spec, results.campaign.cells
    found = [
        "Ranks end by SIGKILL, at points that all have come to; ranks that hang or grow slow, and networks that part, "
        "were not tested. Each rank dies at most once, and one is always left.",
        "Overheads and recovery times are those of ranks on one machine, and depend on what else it did meanwhile; "
        "outcomes, accuracy and steps don't.",
    ]
    if any(all(axis in cell.axes for axis in POINT) and not isinstance(cell.axes["step"], str) for cell in cells):
        found.append("Where rank, step and bucket are given, all trials of one training seed are the same run: their "
                     "intervals speak of times only.")  # fmt: skip
    if len(spec.training_seeds) == 1:
        found.append("One training seed: this speaks of one training run, and not of training.")
    else:
        found.append(f"Intervals are over deaths in {len(spec.training_seeds)} training runs; how much other runs "
                     "would differ is not in them.")  # fmt: skip
    return [*found, f"One network and data set: {spec.recipe}; another may differ."]
