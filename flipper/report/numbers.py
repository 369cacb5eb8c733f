"""Numbers as a reader sees them: three significant digits, the exact value kept beside in <data>."""

from __future__ import annotations

import math
from typing import Any, Final

from markupsafe import Markup

MINUS: Final = "\u2212"
NONE: Final = "\u2013"
"""What stands for a number that there is not."""

_SUPERSCRIPTS: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_PLAIN: Final = range(-4, 6)
"""Powers of ten that are written out."""


def significant(value: float | None, digits: int = 3) -> str:
    """The number in this many significant digits; whole ones in full, very large or small ones with a power of ten."""
    if value is None or math.isnan(value):
        return NONE if value is None else "NaN"
    if math.isinf(value):
        return "\u221e" if value > 0 else f"{MINUS}\u221e"
    sign = MINUS if value < 0 else ""
    if isinstance(value, int) or value == 0:
        return f"{sign}{abs(value):,.0f}"
    mantissa, _, power = f"{abs(value):.{digits - 1}e}".partition("e")
    if int(power) not in _PLAIN:
        return f"{sign}{mantissa} \u00d7 {ten_to(int(power))}"
    return f"{sign}{abs(value):,.{max(0, digits - 1 - int(power))}f}"


def ten_to(power: int) -> str:
    """A power of ten, such as 10\u207b\u2075."""
    return f"10{str(power).translate(_SUPERSCRIPTS)}"


def given(value: float) -> str:
    """A number that somebody chose, as it was chosen."""
    return f"{round(value, 9):g}"


def percent(value: float | None) -> str:
    """A share in per cent."""
    return NONE if value is None else f"{significant(100.0 * value)}%"


def points(value: float | None) -> str:
    """A difference of shares in percentage points, with its sign."""
    return NONE if value is None else ("+" if value > 0 else "") + significant(100.0 * value)


def exact(shown: str, value: Any) -> Markup:
    """The shown text of a number, with its exact value for machines."""
    return Markup("<data value='{}'>{}</data>").format("" if value is None else repr(value), shown)


def number_(value: float | None) -> Markup:
    """A number for the page."""
    return exact(significant(value), value)


def percent_(value: float | None) -> Markup:
    """A share for the page."""
    return exact(percent(value), value)


def points_(value: float | None) -> Markup:
    """A difference of shares for the page."""
    return exact(points(value), value)


def p_(value: float | None) -> Markup:
    """A p value for the page; one that is below what a double holds is no zero."""
    return exact("< 10\u207b\u00b3\u2070\u2070" if value is not None and value < 1e-300 else significant(value), value)
