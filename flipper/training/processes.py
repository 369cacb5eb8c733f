"""What Linux tells of a process, by its number: its state, and when it started."""

from __future__ import annotations


def is_stopped(pid: int | None) -> bool:
    """Whether a signal (SIGSTOP) or a debugger has stopped a process; False where that can't be seen."""
    return stat(pid)[:1] in (["T"], ["t"])


def started_at(pid: int | None) -> str:
    """When a process started, in the kernel's ticks since the machine's start; "" where that can't be seen."""
    return (stat(pid) or [""] * 20)[19]


def stat(pid: int | None) -> list[str]:
    """What proc_pid_stat(5) has behind the name, the state first; [] without such a process, and on other systems."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
