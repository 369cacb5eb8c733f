"""Summary: the numbers of a campaign's report: outcomes with intervals, comparisons, exposure, controls, savings."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

from flipper.campaigns.cells import Cell
from flipper.campaigns.contrast import contrast_of, pair_up, primary, question
from flipper.campaigns.outcomes import OUTCOMES, calibrates
from flipper.campaigns.recoveries import averages, death_limits, differences, strategies
from flipper.campaigns.results import Results, Trial
from flipper.statistics.exposure import harm_rate
from flipper.statistics.intervals import Interval, clopper_pearson, wilson, zero_events_limit
from flipper.statistics.multiple import holm
from flipper.statistics.weighted import post_stratified, weighted_proportion

UNIT_FIT: Final = 1.0
"""FIT per Mbit that rates are given for where the spec names none: multiply by your machine's."""


def summary(results: Results) -> dict[str, Any]:
    """Everything that the report says in numbers, ready for JSON."""
    spec = results.campaign.spec
    return {
        "name": spec.name,
        "primary": primary(results),
        "cells": [cell_summary(results, cell) for cell in results.campaign.cells],
        "comparisons": comparisons(results),
        **({"strategies": strategies(results), "differences": differences(results)} if results.lose_ranks else {}),
        "exposure": [] if results.lose_ranks else exposure(results),
        "detectors": detectors(results),
        "any_detector": any_detector(results),
        "null": nulls(results),
        "controls": controls(results),
        "savings": savings(results),
        "thresholds": {
            "bands": {p: results.band(p).width for p in _parallels(results)},
            "extreme_factor": spec.extreme_factor,
            "equivalence": spec.equivalence,
            "confidence": spec.confidence,
            "metric": spec.metric,
            "better": spec.better,
        },
        "limits": limits(results),
    }


def cell_summary(results: Results, cell: Cell) -> dict[str, Any]:
    """The outcomes of a cell, each with its Wilson interval, and the harmful ones with the exact one too.

    weighted: the harmful share of the whole population, where the draw was not uniform. stopping: of a margin.
    """
    spec, trials = results.campaign.spec, results.by_cell[cell.number]
    counts = Counter(trial.judgement.outcome for trial in trials)
    harmful = sum(trial.harmful for trial in trials)
    census = _complete(results, cell)
    found = {
        "cell": cell.number,
        **cell.axes,
        "trials": len(trials),
        "population": max((trial.run.population for trial in trials), default=0),
        "outcomes": {name: _proportion(counts[name], len(trials), spec.confidence, census) for name in OUTCOMES},
        "not_benign": _proportion(harmful, len(trials), spec.confidence, census),
    }
    if any(trial.run.weight != 1 for trial in trials):
        hits, weights = [t.harmful for t in trials], [t.run.weight for t in trials]
        estimate, interval = weighted_proportion(hits, weights, spec.confidence)
        found["weighted"] = {"proportion": estimate, "low": interval.low, "high": interval.high}
    if spec.margin is not None:
        found["stopping"] = _stopping(results, trials)
    if results.lose_ranks:
        found["measured"] = averages(results, trials)
    return found


def _complete(results: Results, cell: Cell) -> bool:
    """Whether every eligible bit was struck, so that there is no sampling error."""
    trials = results.by_cell[cell.number]
    return results.campaign.spec.census and bool(trials) and len(trials) >= trials[0].run.population


def _stopping(results: Results, trials: Sequence[Trial]) -> dict[str, Any]:
    from flipper.campaigns.stopping import finished_prefix, plan_for

    plan = plan_for(results.campaign.spec)
    decision = plan.decide(finished_prefix({t.run.trial: t.harmful for t in trials}))
    interval = decision.interval
    return {
        "stop": decision.stop,
        "trials": decision.trials,
        "not_benign": decision.hits,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "alpha": plan.alpha,
        "coverage": plan.coverage,
    }


def _proportion(count: int, trials: int, confidence: float, census: bool = False) -> dict[str, Any]:
    """A count with its intervals; of no event the one-sided limit too."""
    if census:
        share = count / trials
        return {"count": count, "proportion": share, "low": share, "high": share, "census": True}
    score, exact = wilson(count, trials, confidence), clopper_pearson(count, trials, confidence)
    found = {
        "count": count,
        "proportion": count / trials if trials else None,
        "low": score.low,
        "high": score.high,
        "exact_low": exact.low,
        "exact_high": exact.high,
    }
    if trials and count == 0:
        found["at_most"] = zero_events_limit(trials, confidence)
    return found


def comparisons(results: Results) -> list[dict[str, Any]]:
    """Exploratory ones, with Holm over all: other pairs of layouts, the primary pair cell by cell, and reaches.

    Where ranks die, recoveries in the layouts' place, and layouts in that of reaches.
    """
    found: list[dict[str, Any]] = []
    axis, cells = question(results.campaign.spec), results.campaign.cells
    main = contrast_of(results.campaign.spec, cells)
    for a, b in itertools.combinations(dict.fromkeys(str(cell.axes[axis]) for cell in cells), 2):
        if (a, b) != main and (b, a) != main:
            found += _compared(results, axis, a, b)
    if main is not None:
        found += _cell_by_cell(results, axis, *main)
    other, values = ("parallel", _parallels(results)) if results.lose_ranks else ("reach", _reaches(results))
    for a, b in itertools.combinations(values, 2):
        found += _compared(results, other, a, b)
    adjusted = holm([each["p"] for each in found])
    return [each | {"p_holm": p} for each, p in zip(found, adjusted, strict=True)]


def _compared(results: Results, axis: str, a: str, b: str) -> list[dict[str, Any]]:
    value: Callable[[Cell], str] = (lambda cell: cell.reach) if axis == "reach" else (lambda cell: str(cell.axes[axis]))
    left = [cell for cell in results.campaign.cells if value(cell) == a]
    right = [cell for cell in results.campaign.cells if value(cell) == b]
    found = pair_up(results, axis, left, right)
    return [] if found is None else [{"axis": axis, "a": a, "b": b, **found}]


def _cell_by_cell(results: Results, axis: str, a: str, b: str) -> list[dict[str, Any]]:
    found = []
    partners = {cell.without(axis): cell for cell in results.campaign.cells if cell.axes[axis] == b}
    for cell in results.campaign.cells:
        other = partners.get(cell.without(axis)) if cell.axes[axis] == a else None
        if other is not None and (one := pair_up(results, axis, [cell], [other])) is not None:
            axes = {name: value for name, value in cell.axes.items() if name != axis}
            found.append({"axis": axis, "a": a, "b": b, "within": axes, **one})
    return found


def exposure(results: Results) -> list[dict[str, Any]]:
    """What is resident under each layout, and the rate of harm of upsets in it, for people who pay by the job-hour.

    The probability is that of one upset in a uniformly chosen bit of what the layout's cells of one fault cover:
    each cell weighs by its population. Cells that strike one copy are used where there are some, since an upset in
    memory strikes one. None without such cells.
    """
    spec, found = results.campaign.spec, []
    fit = UNIT_FIT if spec.fit is None else spec.fit
    for parallel in _parallels(results):
        resident = next((g.resident for g in results.goldens.values() if g.parallel == parallel and g.resident), [])
        total = sum(sum(rank.values()) for rank in resident)
        if not total:
            continue
        cells, reach = _of_one_fault(results, parallel)
        probability, interval = _harm(results, cells)
        entry: dict[str, Any] = {
            "parallel": parallel,
            "ranks": len(resident),
            "bits_resident": total,
            "bits_by_kind": {kind: sum(rank[kind] for rank in resident) for kind in resident[0]},
            "bits_per_rank": [sum(rank.values()) for rank in resident],
            "fit_per_mbit": fit,
            "fit_assumed": spec.fit is None,
            "reach": reach,
            "cells": [cell.number for cell in cells],
            "probability": probability,
            "rate_per_job_hour": None,
            "low": None,
            "high": None,
        }
        if probability is not None:
            rate = harm_rate(fit, total, probability, interval)
            entry |= {"rate_per_job_hour": rate.per_hour, "low": rate.interval.low, "high": rate.interval.high}
        found.append(entry)
    return found


def _of_one_fault(results: Results, parallel: str) -> tuple[list[Cell], str]:
    """The cells of a layout whose trials have one fault drawn uniformly, with the reach that says most of memory."""
    cells = [
        cell
        for cell in results.campaign.cells
        if cell.parallel == parallel and cell.model.count == 1 and cell.model.spread == "uniform"
    ]
    one = [cell for cell in cells if cell.reach == "one"]
    every = [cell for cell in cells if cell.reach == "all"]
    covered = {cell.without("parallel", "reach") for cell in one}
    whole = covered >= {cell.without("parallel", "reach") for cell in every}
    return (one, "one") if one and whole else (every, "all")


def _harm(results: Results, cells: Sequence[Cell]) -> tuple[float | None, Interval]:
    populations = [max((t.run.population for t in results.by_cell[cell.number]), default=0) for cell in cells]
    total = sum(populations)
    if not total:
        return None, Interval(0.0, 1.0)
    strata = []
    for cell, bits in zip(cells, populations, strict=True):
        trials = results.by_cell[cell.number]
        strata.append((bits / total, sum(trial.harmful for trial in trials), len(trials)))
    if all(_complete(results, cell) for cell in cells):
        share = sum(weight * hits / number for weight, hits, number in strata)
        return share, Interval(share, share)
    return post_stratified(strata, results.campaign.spec.confidence)


def detectors(results: Results) -> list[dict[str, Any]]:
    """How many harmful, and how many harmless, trials each detector saw, and after how many steps (median)."""
    seen: dict[str, list[tuple[bool, int]]] = defaultdict(list)
    for trial in results.trials:
        usual = {(name, step) for name, step, _ in trial.golden.detected}
        news: dict[str, int] = {}
        for name, step, _ in trial.run.detected:
            if (name, step) not in usual:
                news.setdefault(name, step)
        for name, step in news.items():
            seen[name].append((trial.harmful, step - trial.run.first_step))
    harmful = sum(trial.harmful for trial in results.trials)
    benign = len(results.trials) - harmful
    confidence = results.campaign.spec.confidence
    found = []
    for name in sorted(seen):
        delays = sorted(delay for bad, delay in seen[name] if bad)
        found.append(
            {
                "detector": name,
                "harmful": _proportion(len(delays), harmful, confidence) | {"of": harmful},
                "benign": _proportion(len(seen[name]) - len(delays), benign, confidence) | {"of": benign},
                "median_steps": delays[len(delays) // 2] if delays else None,
            }
        )
    return found


def any_detector(results: Results) -> dict[str, Any]:
    """How many harmful, and how many harmless, trials some detector saw."""
    found = {}
    for name, harmful in (("harmful", True), ("benign", False)):
        mine = [trial for trial in results.trials if trial.harmful == harmful]
        seen = sum(trial.judgement.first_detector is not None for trial in mine)
        found[name] = _proportion(seen, len(mine), results.campaign.spec.confidence) | {"of": len(mine)}
    return found


def nulls(results: Results) -> list[dict[str, Any]]:
    """The band of each layout, and how often null trials that did not set it are called anything but benign."""
    spec, found = results.campaign.spec, []
    for parallel in _parallels(results):
        mine = [null for null in results.nulls if null.parallel == parallel]
        setting = [null for null in mine if calibrates(spec, null)] if spec.tolerance is None else []
        tested = [null for null in mine if null not in setting]
        alarms = sum(results.judge_null(null).group != "benign" for null in tested)
        found.append(
            {
                "parallel": parallel,
                "band": results.band(parallel).width,
                "null_trials": len(mine),
                "setting_the_band": len(setting),
                "tested": len(tested),
                "false_alarms": _proportion(alarms, len(tested), spec.confidence),
            }
        )
    return found


def controls(results: Results) -> list[dict[str, Any]]:
    """Each golden run, its control, and whether the two are identical."""
    by_key = {(c.parallel, c.training_seed, c.checkpoint, c.settings, c.fingerprint): c for c in results.controls}
    found = []
    for golden in results.goldens.values():
        key = golden.parallel, golden.training_seed, golden.checkpoint, golden.settings, golden.fingerprint
        control = by_key.get(key)
        found.append(
            {
                "parallel": golden.parallel,
                "training_seed": golden.training_seed,
                "checkpoint": golden.checkpoint,
                "fingerprint": golden.fingerprint,
                "metric": golden.metric,
                "loss": golden.loss,
                "steps": golden.last_step,
                "identical": control is not None and bool(golden.state_digest)
                and (control.state_digest, control.resume_digest) == (golden.state_digest, golden.resume_digest),
                "seconds": golden.seconds,
            }
        )  # fmt: skip
    return found


def savings(results: Results) -> dict[str, Any]:
    """What equal plans and runs whose future was known saved, and what the audit of them found."""
    trials = [trial.run for trial in results.trials]
    reused = [run for run in trials if run.reused is not None]
    early = Counter(r.ended for r in trials if r.ended_early and r.reused is None)
    last = {key: golden.last_step for key, golden in results.goldens.items()}
    whole = sum(last[_golden_key(trial)] - trial.run.first_step for trial in results.trials)
    run = sum(r.last_step - r.first_step for r in trials if r.reused is None)
    return {
        "trials": len(trials),
        "met_golden": early["identical"],
        "all_nonfinite": early["non-finite"],
        "reused": len(reused),
        "steps": whole,
        "steps_run": run,
        "share_saved": 1 - run / whole if whole else 0.0,
        "audited": len(results.audits),
        "audits_agreed": len(results.audits),  # one that doesn't ends the campaign
        "seconds": results.facts.get("seconds"),
        "seconds_training": sum(r.seconds for r in trials if r.reused is None),
    }


def _golden_key(trial: Trial) -> tuple[Any, ...]:
    from flipper.campaigns.outcomes import golden_key

    return golden_key(trial.run)


def limits(results: Results) -> list[str]:
    """What the campaign does not show, in words."""
    spec = results.campaign.spec
    if results.lose_ranks:
        return death_limits(results)
    axes = {axis: {str(cell.axes.get(axis)) for cell in results.campaign.cells} for axis in results.axes}
    found = ["Faults are wrong bits in what a checkpoint holds, or in memory between two steps; wrong arithmetic, "
             "gradients, activations and messages were not struck."]  # fmt: skip
    if len(spec.training_seeds) == 1:
        found.append("One training seed: this speaks of one training run, and not of training.")
    if not any("one" in reach or "rank" in reach for reach in axes.get("reach", ())):
        found.append("Every copy of a struck element was struck, as an altered file does; an upset in one rank's "
                     "memory was not tested (reach).")  # fmt: skip
    if "role" in axes and (missing := _roles(results) - axes["role"]) and "None" not in axes["role"]:
        found.append(f"Not struck: {', '.join(sorted(missing))}.")
    if spec.recipe:
        found.append(f"One network and data set: {spec.recipe}; another may differ.")
    return found


def _roles(results: Results) -> set[str]:
    """What of a training state there is to strike."""
    buffers = any(rank.get("buffers") for golden in results.goldens.values() for rank in golden.resident)
    return {"parameter", "optimizer"} | ({"buffer"} if buffers else set())


def _reaches(results: Results) -> list[str]:
    return sorted({cell.reach for cell in results.campaign.cells})


def _parallels(results: Results) -> list[str]:
    return list(dict.fromkeys(cell.parallel for cell in results.campaign.cells))

