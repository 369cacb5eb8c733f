"""The contrast: trials under two layouts, pair by pair, and what they say of the difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from flipper.campaigns.cells import Cell
from flipper.campaigns.fault_kinds import RANK_LOSS
from flipper.campaigns.results import Results, Trial
from flipper.campaigns.spec import Spec
from flipper.errors import UsageError
from flipper.statistics.between import over_seeds
from flipper.statistics.clusters import (
    clustered_difference,
    clustered_equivalence_p,
    sign_flip_exact,
)
from flipper.statistics.paired import Pairs, Stratum, stratified_mcnemar
from flipper.training.layouts import Parallel

ALPHA = 0.05
"""Error of each of the two one-sided tests of equivalence."""

Match = tuple[Trial, Trial]


def question(spec: Spec) -> str:
    """The axis that the primary question is about."""
    return "recovery" if spec.fault == RANK_LOSS else "parallel"


def contrast_of(spec: Spec, cells: Iterable[Cell]) -> tuple[str, str] | None:
    """What the primary question compares: the layouts, or recoveries, that the spec names.

    Else the first data- and model-parallel layout; of recoveries, the two where there are just two.
    """
    axis = question(spec)
    layouts = list(dict.fromkeys(str(cell.axes[axis]) for cell in cells))
    if spec.contrast is not None:
        if missing := [name for name in spec.contrast if name not in layouts]:
            raise UsageError(f"campaign.contrast names {missing[0]!r}; the axis {axis} has {', '.join(layouts)}")
        return spec.contrast
    if axis == "recovery":
        return (layouts[0], layouts[1]) if len(layouts) == 2 else None
    kinds = {name: _kind(name) for name in layouts}
    data = next((name for name in layouts if kinds[name] == "data"), None)
    model = next((name for name in layouts if kinds[name] == "model"), None)
    return None if data is None or model is None else (data, model)


def _kind(name: str) -> str:
    """data, model, or another: a pair of both, one rank, a user's own command."""
    try:
        layout = Parallel.parse(name)
    except UsageError:
        return "own"
    if (layout.data is None) == (layout.model is None):
        return "other"
    return "data" if layout.data is not None else "model"


def primary(results: Results) -> dict[str, Any]:
    """The answer to the campaign's question: harm under data- minus harm under model-parallel training, over all cells.

    Where ranks die, harm under one recovery minus harm under another.

    Doses nest and share their draw, so a draw's pairs are one cluster: p is the exact sign-flip test over draws, which
    is McNemar's where each has one pair; mcnemar_p takes all pairs for independent. equivalent: whether the difference
    lies inside the margin, by two one-sided tests.
    """
    main = contrast_of(results.campaign.spec, results.campaign.cells)
    if main is None:
        return {"endpoint": "not benign", "a": None, "b": None, "pairs": 0}
    a, b = main
    axis = question(results.campaign.spec)
    left = [cell for cell in results.campaign.cells if cell.axes[axis] == a]
    right = [cell for cell in results.campaign.cells if cell.axes[axis] == b]
    matches = matched(axis, results, left, right)
    found: dict[str, Any] = {"endpoint": "not benign", "a": a, "b": b}
    if not matches:
        return found | {"pairs": 0}
    return found | tested(results, matches, axis) | {"over_seeds": _over_seeds(results, matches)}


def pair_up(results: Results, axis: str, left: Sequence[Cell], right: Sequence[Cell]) -> dict[str, Any] | None:
    """What the trials of two sets of cells say, matched by seed and all axes but one; None without any pair."""
    matches = matched(axis, results, left, right)
    return tested(results, matches, axis) if matches else None


def matched(axis: str, results: Results, left: Sequence[Cell], right: Sequence[Cell]) -> list[Match]:
    """Pairs of finished trials that differ in one axis only, of all numbers that both cells have finished."""
    partners = {cell.without(axis): cell for cell in right}
    found = []
    for cell in left:
        other = partners.get(cell.without(axis))
        if other is None:
            continue
        mine = {trial.run.trial: trial for trial in results.by_cell[cell.number]}
        theirs = {trial.run.trial: trial for trial in results.by_cell[other.number]}
        found += [(mine[number], theirs[number]) for number in sorted(mine.keys() & theirs.keys())]
    return found


def tested(results: Results, matches: Sequence[Match], axis: str) -> dict[str, Any]:
    """Difference, interval, tests and equivalence of matched trials."""
    spec = results.campaign.spec
    clusters = _clusters(matches)
    pairs = Pairs.of((a.harmful, b.harmful) for a, b in matches)
    difference, interval = clustered_difference(clusters, spec.confidence)
    equivalence_p = clustered_equivalence_p(clusters, spec.equivalence)
    others = [name for name in results.axes if name != axis]
    return {
        "matched_by": ["seed", *others],
        "pairs": pairs.pairs,
        "draws": len(clusters),
        "both": pairs.both,
        "only_a": pairs.only_a,
        "only_b": pairs.only_b,
        "neither": pairs.neither,
        "difference": difference,
        "low": interval.low,
        "high": interval.high,
        "p": sign_flip_exact(clusters),
        "mcnemar_p": stratified_mcnemar([pairs.stratum]),
        "equivalence_margin": spec.equivalence,
        "equivalence_p": equivalence_p,
        "equivalent": equivalence_p <= ALPHA,
    }


def _clusters(matches: Sequence[Match]) -> list[Stratum]:
    """The pairs of each draw together: those that share a seed."""
    draws: dict[Any, list[tuple[bool, bool]]] = defaultdict(list)
    for a, b in matches:
        draws[a.run.seed if a.run.seed is not None else (a.cell.drawing, a.run.trial)].append((a.harmful, b.harmful))
    return [Pairs.of(pairs).stratum for pairs in draws.values()]


def _over_seeds(results: Results, matches: Sequence[Match]) -> dict[str, Any]:
    """The difference of each training seed, and what they say of other seeds."""
    seeds: dict[int, list[int]] = defaultdict(list)
    for a, b in matches:
        seeds[a.run.training_seed].append(int(a.harmful) - int(b.harmful))
    values = {seed: sum(gaps) / len(gaps) for seed, gaps in sorted(seeds.items())}
    found = over_seeds(list(values.values()), results.campaign.spec.confidence)
    return {
        "values": {str(seed): value for seed, value in values.items()},
        "mean": found.mean,
        "deviation": found.deviation,
        "low": None if found.interval is None else found.interval.low,
        "high": None if found.interval is None else found.interval.high,
        "one_run": found.one_run,
    }
