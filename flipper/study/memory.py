"""Memory and page cache of a rank: the highest it came to, and files put out of the cache; by Linux's own counts."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path
from typing import Final

PAGE: Final = mmap.PAGESIZE


def settle() -> None:
    """Give back to the system what was freed, so that a peak is not hidden in memory that is kept for later."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_bytes() -> int | None:
    """Memory that processes may still take; None where the system doesn't tell."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def begin_peak() -> int | None:
    """Forget the peak so far; bytes resident now. None where the system doesn't tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except (OSError, KeyError):
        return None


def peak_since(before: int | None) -> int | None:
    """Bytes by which this process was larger than `before` at its largest since then."""
    return None if before is None else max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii", errors="replace").splitlines()
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(values[name].split()[0]) * 1024


def files_of(path: Path) -> list[Path]:
    """A checkpoint's files."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def evict(path: Path) -> bool:
    """Put a checkpoint's files, which must be on the disk already, out of the page cache; whether none is left there.

    A file system in memory keeps them, and some systems have no way to ask: what is read then is not cold.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return all(resident_pages(file) == 0 for file in files_of(path))


def resident_pages(file: Path) -> int:
    """How many pages of a file are in the page cache."""
    size = file.stat().st_size
    if not size:
        return 0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-size // PAGE)
        marks = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), marks
        )
        del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(mark & 1 for mark in marks)
