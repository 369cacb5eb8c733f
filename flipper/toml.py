"""TOML as Python values, on every Python that flipper runs on."""

from __future__ import annotations

import sys
from typing import Any

from flipper.errors import UsageError


def parse(text: str, none: str = "no TOML") -> dict[str, Any]:
    """The tables of a TOML document; raises UsageError, beginning with `none`, saying where it is none."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{none}: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{none}: its lists or tables nest too deep") from error
