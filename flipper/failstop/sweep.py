"""Sweeps the failure rate: the trade-off of every strategy over several seeds, and where two strategies break even."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from flipper.errors import UsageError
from flipper.failstop.break_even import HOUR, Difference, break_evens
from flipper.failstop.failures import Drawn
from flipper.failstop.simulate import NOBODY, Case, Outcome, SimulationSpec, outcome, timings
from flipper.statistics.between import OverSeeds, over_seeds
from flipper.training.spec import Event

QUANTITIES: Final = ("overhead_fraction", "accuracy_loss")
"""What strategies are compared by; less of it is better."""


@dataclass(frozen=True)
class Point:
    """One strategy at one failure rate, by records as `flipper simulate` prints them, of one seed each.

    records: of runs that were computed, which tell the accuracy. times: of more, of which only the time was worked out.
    """

    strategy: str
    mtbf: float
    records: tuple[dict[str, Any], ...]
    times: tuple[dict[str, Any], ...]

    def of(self, quantity: str) -> list[float]:
        """One value a seed: of a run that ended early an endless overhead, and no accuracy (NaN)."""
        timed = quantity == "overhead_fraction"
        ended = math.inf if timed else math.nan
        found = self.times if timed else self.records
        return [ended if each["error"] or each[quantity] is None else each[quantity] for each in found]

    def over_seeds(self, quantity: str) -> OverSeeds | None:
        """Mean and interval over the runs that came to their end; None when none did."""
        values = [value for value in self.of(quantity) if math.isfinite(value)]
        return over_seeds(values) if values else None

    def record(self) -> dict[str, object]:
        """The row that `flipper simulate --sweep-mtbf` prints."""
        count = len(self.times)
        row: dict[str, object] = {
            "kind": "point",
            "mtbf_seconds": self.mtbf,
            "failures_per_hour": HOUR / self.mtbf,
            "strategy": self.strategy,
            "draws": count,
            "ended_early": sum(each["error"] is not None for each in self.times),
            "failures": sum(each["failures"] for each in self.times) / count,
            "runs": len(self.records),
        }
        for quantity in QUANTITIES:
            found = self.over_seeds(quantity)
            between = None if found is None else found.interval
            row |= {
                quantity: None if found is None else found.mean,
                f"{quantity}_low": None if between is None else between.low,
                f"{quantity}_high": None if between is None else between.high,
            }
        left = sum(each["world_size_end"] for each in self.times) / count
        return {**row, "world_size_end": left, "save_every": self.times[0]["save_every"]}


@dataclass(frozen=True)
class Sweep:
    """What a sweep found. points: by failure rate, then by strategy."""

    spec: SimulationSpec
    seeds: tuple[int, ...]
    mtbfs: tuple[float, ...]
    points: tuple[Point, ...]

    def of(self, strategy: str) -> list[Point]:
        """A strategy's points, MTBF ascending."""
        return [point for point in self.points if point.strategy == strategy]

    def rows(self) -> list[dict[str, object]]:
        """Points, then break-evens, as they are printed."""
        return [*(point.record() for point in self.points), *self.break_evens()]

    def break_evens(self) -> list[dict[str, object]]:
        """A row for each crossing of each pair of strategies, or one that says that there is none."""
        return [
            {"kind": "break-even", "strategy": one, "against": other, "quantity": quantity, **found.record()}
            for one, other in _pairs(self.spec.recoveries)
            for quantity in QUANTITIES
            for found in break_evens(self._difference(one, other, quantity))
        ]

    def _difference(self, one: str, other: str, quantity: str) -> Difference:
        """How much more of it one strategy has than the other, by MTBF and seed."""
        rows = [
            [a - b for a, b in zip(mine.of(quantity), theirs.of(quantity), strict=True)]
            for mine, theirs in zip(self.of(one), self.of(other), strict=True)
        ]
        return Difference(one, other, quantity, self.mtbfs, rows, self.seeds[0])


def _pairs(strategies: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each pair once, against restart where that is one of them."""
    for one, other in itertools.combinations(strategies, 2):
        yield (other, one) if one == "restart" else (one, other)


def sweep(
    spec: SimulationSpec, mtbfs: Sequence[float], repeat: int, draws: int, shape: float = 1.0,
    on_event: Callable[[Event], None] | None = None,
) -> Sweep:  # fmt: skip
    """Simulate each strategy at each mean time between failures (seconds).

    repeat: seeds, from the spec's on, of runs that are computed; draws: seeds, from there on, of which only the time is
    worked out. A seed is that of the training and of the failures; all strategies meet the same ones, and a run is
    compared with the one of its seed that nothing happens to. A restarted run ends in that one's state, which isn't
    computed again. spec.failures and spec.mtbf are not looked at. Raises as simulate.
    """
    if len(set(mtbfs)) < 2:
        raise UsageError("--sweep-mtbf needs two durations or more, as 2s,10s,1min")
    first, rates = spec.train.seed or 0, sorted(set(mtbfs))
    seeds = [(first + number) % 2**64 for number in range(max(repeat, draws))]
    failures = {(mtbf, seed): Drawn(mtbf, spec.workers, seed, shape) for mtbf in rates for seed in seeds}
    cases = [Case(mtbf, drawn) for (mtbf, _), drawn in failures.items()]
    keys = [(mtbf, strategy) for mtbf in rates for strategy in spec.recoveries]
    times = {strategy: timings(spec, strategy, cases, on_event) for strategy in spec.recoveries}
    computed: dict[tuple[float, str], list[dict[str, Any]]] = {key: [] for key in keys}
    for number, seed in enumerate(seeds[:repeat]):
        train = replace(spec.train, seed=seed)
        clean = outcome(replace(spec, train=train), NOBODY, on_event)
        for mtbf, strategy in keys:
            if strategy == "restart":
                found = _ended_as(clean, times[strategy][rates.index(mtbf) * len(seeds) + number])
            else:
                here = replace(spec, train=train, mtbf=mtbf, failures=failures[mtbf, seed])
                found = outcome(here, strategy, on_event)
            computed[mtbf, strategy].append(found.record(clean))
    points = []
    for mtbf, strategy in keys:
        begin = rates.index(mtbf) * len(seeds)
        timed = tuple(each.record(Outcome("")) for each in times[strategy][begin : begin + len(seeds)])
        points.append(Point(strategy, mtbf, tuple(computed[mtbf, strategy]), timed))
    return Sweep(spec, tuple(seeds[:repeat]), tuple(rates), tuple(points))


def _ended_as(clean: Outcome, timed: Outcome) -> Outcome:
    """What a restarted run comes to, of which only the time is known."""
    if timed.error is not None:
        return timed
    return replace(timed, loss=clean.loss, accuracy=clean.accuracy, state_digest=clean.state_digest)
