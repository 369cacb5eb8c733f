"""What the numbers given to a statistic may be; anything else is refused in one line."""

from __future__ import annotations

from statistics import NormalDist

from flipper.errors import UsageError


def check_confidence(confidence: float) -> None:
    """Raises UsageError unless 0 < confidence < 1."""
    if not 0 < confidence < 1:
        raise UsageError(f"confidence: {confidence} is not between 0 and 1")


def check_share(name: str, count: float, whole: str, total: float) -> None:
    """Raises UsageError unless 0 <= count <= total. name, whole: what the two are called in the message."""
    if not 0 <= count <= total:
        raise UsageError(f"{name}: {count} is not between 0 and {whole}, {total}")


def two_sided(confidence: float) -> float:
    """The standard normal quantile that leaves half of 1 - confidence above it: 1.95996... for 0.95."""
    check_confidence(confidence)
    return -NormalDist().inv_cdf((1 - confidence) / 2)
