"""Kept: what golden runs left for trials and what they were made from, and whether it is still as it was."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flipper.campaigns.cells import canonical
from flipper.errors import DAMAGED, UsageError
from flipper.injection.manifest import sha256_of


@contextmanager
def reading(record: Path) -> Iterator[None]:
    """Raise UsageError, and say what to do, where a golden run's folder is not as it was left, or can't be read."""
    try:
        yield
    except PermissionError as error:
        raise UsageError(f"{error.filename or record} can't be read: {error.strerror}") from error
    except DAMAGED as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
        raise UsageError(
            f"the golden run in {record.parent} is damaged: {what}; remove that folder, and it is made again"
        ) from error


def content_of(path: Path) -> dict[str, Any]:
    """What a file is, or a checkpoint of several, for is_unchanged."""
    return {"files": signature(path), "sha256": sha256_of(path)}


def is_unchanged(path: Path, then: dict[str, Any]) -> bool:
    """Whether it is there as content_of told; contents are only read where its files are of another time."""
    now = signature(path)
    return now == then["files"] or (bool(now) and _content_once(path, canonical(now)) == then["sha256"])


def check_unchanged(path: Path, then: dict[str, Any]) -> None:
    """Raise UsageError where a file that a golden run was made from is gone, or another by now."""
    if not path.exists():
        raise UsageError(
            f"{path} is not there any more: put it back; where the folder was moved, run the campaign's file in its "
            "new place, with --out"
        )
    if not is_unchanged(path, then):
        raise UsageError(f"{path} has changed since its golden run; choose another --out")


def signature(path: Path) -> dict[str, list[int]]:
    """Size and time of change of each file of a checkpoint, by its name in it."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = {str(file.relative_to(path)): file.stat() for file in files if file.is_file()}
    return {name: [fact.st_size, fact.st_mtime_ns] for name, fact in facts.items()}


@functools.lru_cache(maxsize=64)
def _content_once(path: Path, signature: str) -> str:
    return sha256_of(path)
