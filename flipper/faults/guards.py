"""Guards: conditions on what a fault makes of its element."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np

from flipper.bits import BitLayout
from flipper.bits.layout import Bits

Passed = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Guards:
    """Conditions on the struck element. finite: it is a finite number. max_abs: bound on its magnitude.
    direction: "0to1" or "1to0", the only way in which bits may change (and one does)."""

    finite: bool = False
    max_abs: Fraction | None = None
    direction: str | None = None

    def __bool__(self) -> bool:
        return self.finite or self.max_abs is not None or self.direction is not None

    def passed(self, layout: BitLayout, before: Bits, after: Bits) -> Passed:
        """Which of the changes the guards let through."""
        ok = np.ones(after.shape, np.bool_)
        if self.direction is not None:
            gone, new = before & ~after, after & ~before
            wanted, unwanted = (new, gone) if self.direction == "0to1" else (gone, new)
            ok &= (wanted != 0) & (unwanted == 0)
        if self.finite:
            ok &= layout.is_finite(after)
        if self.max_abs is not None:
            ok &= _within(layout, after, self.max_abs)
        return ok


def _within(layout: BitLayout, bits: Bits, limit: Fraction) -> Passed:
    """Whether |number| <= limit: as float64 for floating-point dtypes, exactly for integers; NaN never is."""
    numbers = layout.decode(bits)
    if layout.real:
        return np.asarray(np.abs(numbers) <= float(min(limit, Fraction(sys.float_info.max))))
    if layout.kind == "int":
        numbers = np.abs(numbers).view(np.uint64)  # |-2**63| wraps to itself, which read as unsigned is right
    return np.asarray(numbers.astype(np.uint64) <= np.uint64(min(floor(limit), 2**64 - 1)))
