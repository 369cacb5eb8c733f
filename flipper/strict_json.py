"""Strict JSON: every value as something that JSON has a word for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_UNSEEN = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Controls that JSON allows as they are: those that steer a terminal, end lines, or turn the order of writing."""


def text(value: Any, separators: tuple[str, str] | None = None, ascii_only: bool = False) -> str:
    """The value as JSON on one line, by the rules of `strict`; lone surrogates are escaped, so that it has a UTF-8."""
    try:  # nearly every value is strict as it is, and then json's own encoder does it ten times as fast
        line = json.dumps(value, ensure_ascii=ascii_only, allow_nan=False, separators=separators, default=strict)
    except (TypeError, ValueError):
        line = json.dumps(strict(value), ensure_ascii=ascii_only, allow_nan=False, separators=separators)
    # Python spells a lone surrogate as JSON does.
    line = line if line.isascii() else line.encode("utf-8", "backslashreplace").decode("utf-8")
    return line if line.isprintable() else _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def strict(value: Any) -> Any:
    """The value with non-finite numbers as "NaN", "Infinity", "-Infinity", and anything foreign as its text."""
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value if isinstance(value, int | str) else str(value)
