"""How many faults to inject for a margin of error, and the margin that a number of faults gives."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, sqrt
from statistics import NormalDist

from flipper.errors import UsageError


def trials_needed(population: int, margin: float = 0.05, confidence: float = 0.95, proportion: float = 0.5) -> int:
    """Faults to draw without replacement so that the estimated proportion is within `margin` with `confidence`.

    population: number of possible faults. margin: half width, of a proportion. proportion: expected; 0.5 is the worst.
    Never more than the population. Raises UsageError for values outside their ranges.
    Source: Leveugle, Calvez, Maistri, Vanhauwaert, "Statistical fault injection: quantified error and confidence",
    DATE 2009, equation for n: N / (1 + e^2 (N - 1) / (t^2 p (1 - p))).
    """
    _check(population, confidence, proportion)
    if not 0 < margin < 1:
        raise UsageError(f"--margin: {margin} is not between 0 and 1")
    if population == 0:
        return 0
    spread = Fraction(_quantile(confidence)) ** 2 * Fraction(proportion) * (1 - Fraction(proportion))
    needed = population / (1 + Fraction(margin) ** 2 * (population - 1) / spread)
    return min(population, ceil(needed))


def margin_reached(population: int, trials: int, confidence: float = 0.95, proportion: float = 0.5) -> float:
    """The margin of error that `trials` faults of a population give; 0 when all were injected.

    Source: the same equation, solved for e.
    """
    _check(population, confidence, proportion)
    if not 1 <= trials <= population:
        raise UsageError(f"--trials: {trials} is not between 1 and the population, {population}")
    if population == 1:
        return 0.0
    left = (population - trials) / (population - 1)
    return _quantile(confidence) * sqrt(proportion * (1 - proportion) / trials * left)


def _quantile(confidence: float) -> float:
    """The cut-off point t, to four decimals as the paper gives it (1.96, 2.5758), so that published trials come out."""
    exact = NormalDist().inv_cdf((1 + confidence) / 2)
    return round(exact, 4) or exact


def _check(population: int, confidence: float, proportion: float) -> None:
    if population < 0:
        raise UsageError(f"--population: {population} is negative")
    if not 0 < confidence < 1:
        raise UsageError(f"--confidence: {confidence} is not between 0 and 1")
    if not 0 < proportion < 1:
        raise UsageError(f"--proportion: {proportion} is not between 0 and 1")
