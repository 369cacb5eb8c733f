"""Effects: what a fault does to the element that it strikes, as an operation, a mask and a value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from flipper.bits import BitLayout
from flipper.bits.layout import Bits
from flipper.errors import UsageError
from flipper.faults.counts import exact

KINDS = "flip, set0, set1, random, flip:0xMASK, scale:FACTOR"
FLIP, WRITE = 0, 1
"""The two operations: XOR the mask; put the value's bits where the mask has ones."""

OPS = ("flip", "write")


@dataclass(frozen=True)
class Effect:
    """kind: flip, set0, set1, random, mask or scale. unit: what is drawn: "bit", "window" (a burst) or "element".

    mask: of kind "mask". factor: of kind "scale". burst: neighbouring bits that one fault strikes.
    """

    kind: str
    unit: str
    burst: int = 1
    mask: int = 0
    factor: Fraction = Fraction(1)

    @staticmethod
    def parse(text: str, burst: int) -> Effect:
        """The effect that `--effect text --burst burst` names; raises UsageError."""
        if type(burst) is not int or burst < 1:
            raise UsageError(f"--burst: {burst!r} is not a positive number of bits")
        if text in ("flip", "set0", "set1"):
            return Effect(text, "bit" if burst == 1 else "window", burst)
        if burst > 1:
            raise UsageError(f"--burst goes with --effect flip, set0 or set1, not {text}")
        if text == "random":
            return Effect("random", "element")
        if match := re.fullmatch(r"flip:0[xX]([0-9a-fA-F]{1,16})", text):
            mask = int(match[1], 16)
            if mask:
                return Effect("mask", "element", mask=mask)
        if text.startswith("scale:"):
            try:
                factor = exact(text[6:])
                float(factor)  # a factor beyond the largest double is refused here
                return Effect("scale", "element", factor=factor)
            except (ValueError, ZeroDivisionError, OverflowError):
                pass
        raise UsageError(f"--effect: {text!r} is none of {KINDS}")

    def masks(self, layout: BitLayout, positions: tuple[int, ...]) -> tuple[int, ...]:
        """The slots of an element with these eligible positions: the bits that one fault there may strike."""
        if self.kind == "mask":
            return (self.mask,) if self.mask < 1 << layout.width else ()
        if self.kind == "scale":
            return ((1 << layout.width) - 1,)
        if self.kind == "random":
            return (sum(1 << position for position in positions),) if positions else ()
        eligible = set(positions)
        run = (1 << self.burst) - 1
        return tuple(run << first for first in positions if all(first + i in eligible for i in range(self.burst)))

    @property
    def op(self) -> int:
        """FLIP or WRITE."""
        return FLIP if self.kind in ("flip", "mask") else WRITE

    @property
    def needs_values(self) -> bool:
        """Whether what it writes depends on what is there."""
        return self.kind == "scale"

    def value(self, layout: BitLayout, masks: Bits, before: Bits, random: Bits) -> Bits:
        """The value of each fault: zeros for a flip; `random` are words to take random bits from."""
        if self.kind == "set1":
            return masks
        if self.kind == "random":
            return random & masks
        if self.kind == "scale":
            numbers = np.asarray(layout.decode(before), np.float64)
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                scaled = layout.encode(numbers * float(self.factor))
            return np.where(np.isnan(numbers), before, scaled)  # processors differ in the bits of a computed NaN
        return np.zeros_like(masks)


def strike(before: Bits, op: Any, masks: Bits, values: Bits) -> Bits:
    """The elements after the faults: XORed with the mask, or written with the value where the mask has ones.

    op: FLIP or WRITE, one for all or one an element.
    """
    ops = np.asarray(op)
    if np.all(ops == FLIP):
        return before ^ masks
    written = (before & ~masks) | (values & masks)
    return written if np.all(ops == WRITE) else np.where(ops == FLIP, before ^ masks, written)
