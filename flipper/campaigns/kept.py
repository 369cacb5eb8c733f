"""Kept: what a golden run left in its folder for trials, read again, and whether it is still as it was."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flipper.campaigns.cells import canonical
from flipper.errors import DAMAGED, UsageError


@contextmanager
def reading(record: Path) -> Iterator[None]:
    """Raise UsageError, and say what to do, where a golden run's folder is not as it was left."""
    try:
        yield
    except DAMAGED as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
        raise UsageError(
            f"the golden run in {record.parent} is damaged: {what}; remove that folder, and it is made again"
        ) from error


def content_of(path: Path) -> dict[str, Any]:
    """What a checkpoint's files are, for is_unchanged."""
    return {"files": signature(path), "sha256": _content(path)}


def is_unchanged(path: Path, then: dict[str, Any]) -> bool:
    """Whether a checkpoint is what content_of told; its contents are only read where its files are of another time."""
    now = signature(path)
    return bool(now == then["files"] or _content_once(path, canonical(now)) == then["sha256"])


def signature(path: Path) -> dict[str, list[int]]:
    """Size and time of change of each file of a checkpoint, by its name in it."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = {str(file.relative_to(path)): file.stat() for file in files if file.is_file()}
    return {name: [fact.st_size, fact.st_mtime_ns] for name, fact in facts.items()}


def _content(path: Path) -> str:
    """sha256 over the names and contents of a checkpoint's files."""
    digest = hashlib.sha256()
    for name in signature(path):
        digest.update(f"{name}\0".encode())
        with open(path / name if path.is_dir() else path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


@functools.lru_cache(maxsize=64)
def _content_once(path: Path, signature: str) -> str:
    return _content(path)
