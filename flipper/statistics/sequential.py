"""Stopping when a proportion is known to a margin, with a coverage that is computed and not assumed.

After 50 trials and every 25 from there the exact interval is looked at, and the trials end when it is narrow enough.
Stopping at a moment that suits makes an interval hold less often than in a fixed number of trials. Its nominal error
is therefore lowered until its coverage under this very rule, summed over all ways to come to every stop, is what was
promised, whatever the proportion.

Sources: J. Frey, "Fixed-width sequential confidence intervals for a proportion", The American Statistician 64 (2010)
242-249; the recursion over looks as in C. Jennison and B. W. Turnbull, Group Sequential Methods (2000), chapter 12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from flipper.errors import UsageError
from flipper.statistics.intervals import Interval, clopper_pearson
from flipper.statistics.ranges import check_confidence, check_share

MOST = 20_000
"""Trials beyond which no plan is computed: it would take minutes."""
STEPS = 100
"""Nominal errors that are tried: so many even steps down from the stated one."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the finished trials say under a plan."""

    stop: bool
    trials: int
    """Trials that count: up to the look that decided, or up to the last look so far; 0 before the first."""
    hits: int
    interval: Interval | None
    """At that look. Holds with the plan's confidence if `stop`, a preview otherwise; None before the first look."""
    next_look: int | None
    """Trials at which to look again; None if `stop`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """When to look, when to stop, and the nominal error of the intervals at the looks."""

    margin: float
    confidence: float
    alpha: float
    """Nominal error of each look's Clopper-Pearson interval; at most 1 - confidence."""
    coverage: float
    """The least probability, over all proportions, that the final interval holds the proportion."""
    looks: tuple[int, ...]
    """Trials at each look; the last one always stops."""
    bounds: tuple[int, ...]
    """Per look: stop with at most so many hits, or at most so many misses; -1 where no outcome stops."""

    @classmethod
    def for_margin(cls, margin: float, confidence: float = 0.95, cap: int | None = None) -> Plan:
        """The plan that ends when the half width is at most `margin`, or at `cap` trials whatever it is then.

        Without a cap the last look is where even one half is known to the margin. Takes about two seconds at a margin
        of 0.03, forty at 0.01; computed once per process (keep `record()` to use it in another).
        Raises UsageError for a margin outside (0, 0.5), or so small that it takes more than 20,000 trials.
        """
        check_confidence(confidence)
        if not 0 < margin < 0.5:
            raise UsageError(f"margin: {margin} is not between 0 and 0.5")
        if cap is not None and not 1 <= cap <= MOST:
            raise UsageError(f"cap: {cap} is not between 1 and {MOST}")
        return _plan(float(margin), float(confidence), cap)

    @property
    def maximum(self) -> int:
        """The most trials that it can take."""
        return self.looks[-1]

    def decide(self, outcomes: Sequence[bool]) -> Decision:
        """Whether to stop, from the outcomes of trials 0, 1, 2 ... up to the first that is not finished.

        Trials after the look that decides do not count, so how many ran at once does not change the answer.
        """
        hits = done = 0
        so_far = Decision(False, 0, 0, None, self.looks[0])
        for place, (look, bound) in enumerate(zip(self.looks, self.bounds, strict=True), start=1):
            if look > len(outcomes):
                break
            hits += sum(map(bool, outcomes[done:look]))
            done = look
            interval = clopper_pearson(hits, look, 1 - self.alpha)
            if look == self.maximum or min(hits, look - hits) <= bound:
                return Decision(True, look, hits, interval, None)
            so_far = Decision(False, look, hits, interval, self.looks[place])
        return so_far

    def expected_trials(self, proportion: float) -> float:
        """The trials that it takes on average if this is the true proportion."""
        import numpy as np

        from flipper.statistics.boundary import stops_at

        check_share("proportion", proportion, "certainty", 1)
        at = np.array([proportion])
        return float(sum(stop.look * stop.chances(at).sum() for stop in stops_at(self.looks, self.bounds, self.alpha)))

    def record(self) -> dict[str, Any]:
        """The plan as JSON can hold it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Plan:
        """The plan that `record()` gave."""
        return cls(**{**record, "looks": tuple(record["looks"]), "bounds": tuple(record["bounds"])})


@lru_cache(maxsize=64)
def _plan(margin: float, confidence: float, cap: int | None) -> Plan:
    """Lowers the nominal error until the promise is kept; step by step, since coverage does not rise evenly."""
    from flipper.statistics.boundary import bounds_at, least_coverage, looks_until, most_trials, stops_at

    if cap is None and most_trials(margin, 1 - confidence) > MOST:
        raise UsageError(f"margin: {margin} takes more than {MOST} trials; give a larger one, or a number of trials")
    for step in range(STEPS, 0, -1):
        alpha = (1 - confidence) * step / STEPS
        looks = looks_until(margin, alpha, cap)
        bounds = bounds_at(looks, margin, alpha)
        coverage = least_coverage(stops_at(looks, bounds, alpha))
        if coverage >= confidence:
            return Plan(margin, confidence, alpha, coverage, looks, bounds)
    raise UsageError(f"confidence: {confidence} is kept by no plan that looks so often; give a number of trials")
