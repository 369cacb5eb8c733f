"""From the harm that one fault does to the harm that a job suffers: layouts that hold more bits take more upsets."""

from __future__ import annotations

from dataclasses import dataclass

from flipper.errors import UsageError
from flipper.statistics.intervals import Interval
from flipper.statistics.ranges import check_share

FIT_HOURS = 10**9
"""FIT counts failures in so many device hours."""
MBIT = 10**6
"""Bits in an Mbit, as memory upset rates give it (JEDEC JESD89) and `--fit` reads it; not 2**20."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Events per hour of the whole job, with an interval."""

    per_hour: float
    interval: Interval


def upsets_per_hour(fit: float, bits: int) -> float:
    """Upsets per job-hour in `bits` resident bits, over all ranks.

    fit: upsets in 10^9 device hours and 10^6 bits (FIT per Mbit).
    Raises UsageError for a negative or infinite number.
    """
    for name, value in (("fit", fit), ("bits", bits)):
        if not 0 <= value < float("inf"):
            raise UsageError(f"{name}: {value} is not a finite number of at least 0")
    return fit * bits / MBIT / FIT_HOURS


def harm_rate(fit: float, bits: int, probability: float, interval: Interval) -> Rate:
    """Harmful upsets per job-hour: upsets times the probability that one does harm, its interval carried over.

    Upsets come independently and each does harm with the same probability, so the harmful ones are a Poisson process
    of this rate. fit and bits are taken as known; only the probability's sampling error is in the interval.
    """
    check_share("probability", probability, "certainty", 1)
    upsets = upsets_per_hour(fit, bits)
    return Rate(upsets * probability, Interval(upsets * interval.low, upsets * interval.high))
