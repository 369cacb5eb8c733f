"""What the system says of the processes that a launch started."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that this one has started and that are there still, ended but not reaped ones too."""
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text(encoding="ascii").split()
        ]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(below for child in found for below in descendants(child))]


def alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has reaped yet does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def ranks_below(pid: int) -> dict[int, int]:
    """The ranks among a process's descendants: number -> pid; a rank's stderr goes to a file of its number."""
    found = {}
    for below in descendants(pid):
        try:
            log = os.readlink(f"/proc/{below}/fd/2")
        except OSError:
            continue
        if log.endswith(".log") and "/rank-" in log:
            found[int(log.rpartition("/rank-")[2].removesuffix(".log"))] = below
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it holds within this time."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds
