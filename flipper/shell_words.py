"""Words of command lines that a user is told to type."""

from __future__ import annotations

import shlex
from pathlib import Path


def path_word(path: str | Path) -> str:
    """A path as a shell hands it on as one argument, and as no option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
