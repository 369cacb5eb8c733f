"""Deaths: the axes of a campaign whose ranks die, and which ranks die when in each of its trials."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flipper.errors import UsageError
from flipper.failstop.choices import LOST_SHARES, RECOVERIES, WORLD_BATCHES, WORLD_RATES
from flipper.failstop.kills import LEAST_SHAPE, Kill
from flipper.training.layouts import Parallel

if TYPE_CHECKING:  # of what `campaign status` can do without
    from flipper.failstop.spec import FailstopSpec
    from flipper.training.spec import TrainSpec

POINT: Final = ("rank", "step", "bucket")
"""Axes that say where in a run ranks die; where one is not given, the trial's seed draws it."""

AMOUNTS: Final = ("deaths", "mtbf", "shape")
"""Axes that say how many die; they are no part of a trial's seed, so that more deaths hold the fewer."""

CHOICES: Final = ("world_batch", "world_rate", "lost_share")
"""Axes that say what survivors train with: fields of FailstopSpec."""

AXES: Final = ("parallel", "recovery", *POINT, *AMOUNTS, *CHOICES, "min_ranks")

BEFORE: Final = "before"
"""The value of the axis `bucket` for a death before the forward pass."""

ALLOWED: Final[Mapping[str, str]] = {
    "recovery": "restart, restart:N (with a checkpoint every N steps), rollback or lossy",
    "rank": "a whole number from 0",
    "step": 'a whole number from 1, or a range such as "20-40"',
    "bucket": f'a whole number from 0, or "{BEFORE}" the forward pass',
    "deaths": "a whole number from 1",
    "mtbf": "a number of steps above 0",
    "shape": f"a number from {LEAST_SHAPE:g}, below 100",
    "min_ranks": "a whole number from 1",
}
"""How the values of each axis are said, but for those of CHOICES."""

_LEAST: Final = {"rank": 0, "bucket": 0, "step": 1, "deaths": 1, "min_ranks": 1}
_RANGE: Final = re.compile(r"(\d{1,9})-(\d{1,9})")
_RESTART: Final = re.compile(r"restart:(\d{1,9})")


def check_value(where: str, axis: str, value: Any) -> None:
    """Raise UsageError for a value that an axis can't have; where: the table that it stands in."""
    if axis in CHOICES:
        choices = _choices(axis)
        if value not in choices:
            raise UsageError(f"{where}: {axis} is {value!r}; it must be {' or '.join(choices)}")
    elif axis in ALLOWED and not _allowed(axis, value):
        raise UsageError(f"{where}: {axis} is {value!r}; it must be {ALLOWED[axis]}")


def _choices(axis: str) -> tuple[str, ...]:
    return dict(zip(CHOICES, (WORLD_BATCHES, WORLD_RATES, LOST_SHARES), strict=True))[axis]


def _allowed(axis: str, value: Any) -> bool:
    if isinstance(value, str):
        match axis:
            case "recovery":
                every = _RESTART.fullmatch(value)
                return value in RECOVERIES if every is None else int(every[1]) > 0
            case "step":
                ends = _RANGE.fullmatch(value)
                return ends is not None and 1 <= int(ends[1]) <= int(ends[2])
            case _:
                return axis == "bucket" and value == BEFORE
    if isinstance(value, bool):
        return False
    if axis in _LEAST:
        return isinstance(value, int) and value >= _LEAST[axis]
    if not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max if axis == "mtbf" else axis == "shape" and LEAST_SHAPE <= value < 100


@dataclass(frozen=True)
class Strategy:
    """A recovery, and of restart the steps between checkpoints."""

    recovery: str
    save_every: int = 0

    @classmethod
    def of(cls, axes: Mapping[str, Any], save_every: int) -> Strategy:
        """That of a cell; save_every: of the campaign, for a restart that doesn't say its own."""
        if every := _RESTART.fullmatch(axes["recovery"]):
            return cls("restart", int(every[1]))
        return cls(axes["recovery"], save_every if axes["recovery"] == "restart" else 0)


def job_of(axes: Mapping[str, Any], train: TrainSpec, strategy: Strategy, kills: tuple[Kill, ...] = ()) -> FailstopSpec:
    """The run of a cell, with these deaths; raises UsageError for what can't go together."""
    from flipper.failstop.spec import FailstopSpec

    choices = {axis: axes[axis] for axis in (*CHOICES, "min_ranks") if axis in axes}
    return FailstopSpec(train, kills, strategy.recovery, **choices)


def check_cell(axes: Mapping[str, Any], recipe: str, save_every: int) -> None:
    """Raise UsageError for axes that can't go together."""
    from flipper.training.spec import TrainSpec

    layout = Parallel.parse(str(axes["parallel"]))
    if "recovery" not in axes:
        raise UsageError(f"an axis recovery is missing: {ALLOWED['recovery']}")
    strategy = Strategy.of(axes, save_every)
    if strategy.recovery == "restart" and not strategy.save_every:
        raise UsageError("restart needs checkpoints: say by campaign.save_every how many steps lie between them, or "
                         'by recovery = "restart:20"')  # fmt: skip
    save = Path("checkpoints") if strategy.save_every else None
    overlapped = job_of(
        axes, TrainSpec(recipe, layout, seed=0, save=save, save_every=strategy.save_every), strategy
    ).overlapped
    if "mtbf" in axes and (other := next((axis for axis in (*POINT, "deaths") if axis in axes), None)):
        raise UsageError(f"mtbf = {axes['mtbf']} draws who dies, and when: leave {other} out")
    if "shape" in axes and "mtbf" not in axes:
        raise UsageError(f"shape = {axes['shape']} is that of the distribution whose mean is mtbf: give both")
    deaths, rank = axes.get("deaths", 1), axes.get("rank")
    if deaths >= layout.ranks:
        raise UsageError(f"deaths = {deaths}: {layout} has {layout.ranks} ranks, of which one must be left")
    if rank is not None and rank >= layout.ranks:
        raise UsageError(f"rank = {rank}: {layout} has ranks 0 to {layout.ranks - 1}")
    if rank is not None and deaths > 1:
        raise UsageError(f"rank = {rank} and deaths = {deaths}: a rank dies only once; leave rank out")
    if not overlapped and axes.get("bucket", BEFORE) != BEFORE:
        raise UsageError(f'bucket = {axes["bucket"]}: under {layout} ranks die before a step; leave it at "{BEFORE}"')


def deaths_of(axes: Mapping[str, Any], seed: int, first: int, last: int, buckets: int) -> tuple[Kill, ...]:
    """Who dies in a trial, and when, in the order of time: the same for the same seed, whatever the recovery.

    first, last: the steps of the run. buckets: that gradients are averaged in; 0 where ranks only die between steps.
    Raises UsageError for a step or bucket that the run doesn't have.
    """
    ranks = Parallel.parse(str(axes["parallel"])).ranks
    if "mtbf" in axes:
        found = _failures(axes, ranks, seed, first, last, buckets)
    else:
        found = _drawn(axes, ranks, seed, first, last, buckets)
    return tuple(sorted(found, key=_time))


def _time(kill: Kill) -> tuple[int, int, int]:
    return kill.step or 0, -1 if kill.bucket is None else kill.bucket, kill.rank


def _drawn(axes: Mapping[str, Any], ranks: int, seed: int, first: int, last: int, buckets: int) -> list[Kill]:
    """So many deaths: another rank each time; steps and buckets are uniform among those allowed.

    Each comes from a stream of its own, so that layouts with more ranks lose theirs at the same steps.
    """
    from flipper.faults.stream import Stream

    begin, end = _steps(axes.get("step"), first, last)
    bucket = axes.get("bucket")
    if isinstance(bucket, int) and bucket >= buckets:
        raise UsageError(f"bucket = {bucket}: the model has {buckets} buckets, 0 to {buckets - 1}")
    who, when, where = (Stream(seed, f"deaths/{axis}") for axis in POINT)
    living, found = list(range(ranks)), []
    for _ in range(axes.get("deaths", 1)):
        rank = living.pop(axes["rank"] if "rank" in axes else int(who.below(len(living), 1)[0]))
        step = begin + int(when.below(end - begin + 1, 1)[0])
        point = int(where.below(buckets + 1, 1)[0])
        if bucket is not None:
            point = 0 if bucket == BEFORE else bucket + 1
        found.append(_kill(rank, step, point))
    return found


def _steps(asked: int | str | None, first: int, last: int) -> tuple[int, int]:
    """The first and last step that a rank may die in."""
    low, _, high = (f"{first}-{last}" if asked is None else str(asked)).partition("-")
    begin, end = int(low), int(high or low)
    if not first <= begin <= end <= last:
        raise UsageError(f"step = {asked!r}: trials have the steps {first} to {last}")
    return begin, end


def _failures(axes: Mapping[str, Any], ranks: int, seed: int, first: int, last: int, buckets: int) -> list[Kill]:
    """Each rank's first failure, where it comes before the run ends; the last rank that would be left is spared.

    Time is counted in steps: a failure after 3.4 of them comes in the fourth, two fifths through its buckets.
    """
    from flipper.failstop.failures import Drawn

    drawn = Drawn(float(axes["mtbf"]), ranks, seed, float(axes.get("shape", 1)))
    times = sorted((next(drawn.of(rank)), rank) for rank in range(ranks))
    within = itertools.takewhile(lambda each: each[0] < last - first + 1, times)
    return [
        _kill(rank, first + int(time), int((time - int(time)) * (buckets + 1)))
        for time, rank in itertools.islice(within, ranks - 1)
    ]


def _kill(rank: int, step: int, point: int) -> Kill:
    """point: 0 before the forward pass, else the number of the bucket and 1."""
    return Kill(rank, step, point - 1 if point else None)
