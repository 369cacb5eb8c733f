"""How many faults: Binomial and Poisson counts by exact inversion, in integers alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from flipper.errors import UsageError
from flipper.faults.stream import Stream

_UNIFORM = 128  # bits of the uniform that is inverted
_POINT = 256  # bits behind the point of a term; the mode's term is 1
_SMALLEST = 1 << (_POINT - 136)  # terms below it are left out
_MOST = 10**12  # largest variance: above, the walk over +-14 standard deviations would take minutes

_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_LONGEST = 400  # characters of a decimal


def exact(value: str | int | float | Decimal | Fraction) -> Fraction:
    """The number that was written, exactly: "0.1" and 0.1 are one tenth, not the nearest binary fraction.

    A float counts as the shortest decimal that reads back as it (its repr). Raises UsageError for what is
    not a finite decimal number, has more than 400 characters, or an exponent beyond 999.
    """
    if isinstance(value, (int, Fraction)):
        return Fraction(value)
    text = repr(float(value)) if isinstance(value, float) else str(value).strip()
    if len(text) > _LONGEST or not _DECIMAL.fullmatch(text):
        raise UsageError(f"{text[:40]!r} is not a number; write a decimal such as 0.001 or 1e-9")
    return Fraction(text)


def binomial(stream: Stream, trials: int, probability: Fraction) -> int:
    """How many of `trials` independent trials come out, each with `probability`.

    The smallest count whose cumulative probability exceeds one 128-bit uniform (two words of the stream),
    so for one stream a higher probability never gives a lower count. The terms are (n-k)/(k+1) p/(1-p)
    apart. Raises UsageError unless 0 <= probability <= 1, and for a variance above 10**12.
    """
    uniform = stream.bits(_UNIFORM)
    if not 0 <= probability <= 1:
        raise UsageError(f"the probability is {_shown(probability)}; it must lie in 0 .. 1")
    if trials == 0 or probability == 0:
        return 0
    if probability == 1:
        return trials
    _refuse_wide(trials * probability * (1 - probability))
    odds, against = probability.numerator, probability.denominator - probability.numerator
    mode = (trials + 1) * probability.numerator // probability.denominator
    up = _Ratios((trials - mode) * odds, -odds, (mode + 1) * against, against)
    down = _Ratios(mode * against, -against, (trials - mode + 1) * odds, odds)
    return _invert(uniform, mode, up, down)


def poisson(stream: Stream, mean: Fraction) -> int:
    """How many events happen where `mean` are expected.

    Inverted like `binomial`, with terms that are mean/(k+1) apart: for one stream a higher mean never gives
    a lower count. Raises UsageError for a mean below 0 or above 10**12.
    """
    uniform = stream.bits(_UNIFORM)
    if mean < 0:
        raise UsageError(f"the expected number of upsets is {_shown(mean)}; it can't be negative")
    if mean == 0:
        return 0
    _refuse_wide(mean)
    mode = mean.numerator // mean.denominator
    up = _Ratios(mean.numerator, 0, (mode + 1) * mean.denominator, mean.denominator)
    down = _Ratios(mode * mean.denominator, -mean.denominator, mean.numerator, 0)
    return _invert(uniform, mode, up, down)


class _Ratios(NamedTuple):
    """The factors from one term to the next: numerator / denominator, both moving by a fixed step."""

    numerator: int
    numerator_step: int
    denominator: int
    denominator_step: int

    def terms(self) -> Iterator[int]:
        """The terms next to the mode's, outward, in units of 2**-256 of it, until they no longer count."""
        numerator, numerator_step, denominator, denominator_step = self
        term = (numerator << _POINT) // denominator
        while term >= _SMALLEST:
            yield term
            numerator += numerator_step
            denominator += denominator_step
            term = term * numerator // denominator


def _invert(uniform: int, mode: int, up: _Ratios, down: _Ratios) -> int:
    """The smallest count whose cumulative sum of terms exceeds uniform / 2**128 of their total.

    Rounding: every term is cut by less than one unit, and ratios outward of the mode are at most 1, so the
    j-th term is off by less than j units and the sum of K terms by less than K**2. The total is at least
    2**256 units and K < 2**26 (see _MOST), so probabilities are off by less than 2**-200.
    Truncation: the terms are log-concave. With K of them on one side down to 2**-136, the ratio is at most
    r = 2**(-136 / K) beyond, so the tail is at most 2**-136 / (1 - r), and the terms before it sum to at least
    (1 - 2**-136) / (1 - r): each tail is below 2**-135 of the total.
    Nothing is kept: the terms are made twice, once for the total and once for the walk to the count.
    """
    below = sum(down.terms())
    total = below + (1 << _POINT) + sum(up.terms())
    target = uniform * total >> _UNIFORM
    reached = below
    count = mode
    if target < below:
        for term in down.terms():
            count -= 1
            reached -= term
            if reached <= target:
                break
        return count
    reached += 1 << _POINT
    for term in up.terms():
        if reached > target:
            break
        count += 1
        reached += term
    return count


def _refuse_wide(variance: Fraction) -> None:
    if variance > _MOST:
        raise UsageError(
            f"the number of faults would have a variance of {_shown(variance)}; at most {_MOST:.0e} can be drawn"
        )


def _shown(value: Fraction) -> str:
    """A few digits of a number that may be too big or too small for a float."""
    return f"{Decimal(value.numerator) / Decimal(value.denominator):.4g}"
