"""Scratch: the copy that an injection in place rewrites first, named after its file so that a killed one is found."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flipper.errors import FlipperError, OutputError


@contextmanager
def scratch(original: Path) -> Iterator[Path]:
    """An empty file beside another one, gone afterwards; one that a killed process left there is removed.

    Raises OutputError when another injection has one now, or none can be made; an OSError of the block becomes one.
    """
    clear_scratch(original)
    path = _place(original)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise OutputError(f"{original} is being altered already; if not, remove {path}") from error
    except OSError as error:
        raise OutputError(f"{path.parent} can't be written: {error.strerror}") from error
    try:
        _lock(descriptor)
        yield path
    except FlipperError:
        raise
    except OSError as error:
        raise OutputError(f"{path.parent} can't be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(descriptor)


def clear_scratch(original: Path) -> None:
    """Remove what a killed injection left beside a file; that of a living one is locked, and stays."""
    path = _place(original)
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _lock(descriptor):
                path.unlink()
        finally:
            os.close(descriptor)


def _place(original: Path) -> Path:
    return original.with_name(f".flipper-{original.name}.tmp")


def _lock(descriptor: int) -> bool:
    """Lock a file; False where another process has it locked, or the filesystem has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
