"""Keeper: a process that runs one command, and ends with it all that descends from it, whatever that has detached.

A script of the standard library only, which `process_tree` starts with a job as its argument. It adopts what is
orphaned below it (Linux: PR_SET_CHILD_SUBREAPER), so that a daemon that has forked twice and has a session of its own
is found all the same. It ends all when the launching process is gone, whose pipe is its stdin. It prints one JSON
object.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36

GRACE_SECONDS = 2.0
"""What processes get between SIGTERM and SIGKILL."""

UNKILLABLE_SECONDS = 20.0
"""After which a process that SIGKILL doesn't end (it waits for a device, say) is left and named."""


def main() -> None:
    """Run the job: words, cwd, env (what differs), log, timeout, scratch (a folder that goes if the launcher does)."""
    job = json.loads(sys.argv[1])
    with suppress(AttributeError, OSError):  # not everywhere
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    awake = _wake_on(signal.SIGCHLD)
    began = time.monotonic()
    try:
        with open(job["log"], "ab") as log:
            process = subprocess.Popen(
                job["words"], cwd=job["cwd"], env={**os.environ, **job["env"]}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        _tell({"error": f"{error.filename or job['words'][0]}: {error.strerror}"})
        return
    code, manner = _follow(process.pid, began + job["timeout"], awake)
    seconds = time.monotonic() - began
    left = end_descendants()
    if manner == "left alone":
        shutil.rmtree(job["scratch"], ignore_errors=True)
    else:
        _tell({"code": code, "timed_out": manner == "late", "seconds": seconds, "left": left})


def _tell(answer: dict[str, object]) -> None:
    """Print an answer, or nothing where nobody reads it any more."""
    # Not sys.stdout, which at exit would complain of what it could not write.
    with suppress(BrokenPipeError), open(1, "w", encoding="ascii", closefd=False) as out:
        out.write(json.dumps(answer) + "\n")


def _wake_on(number: int) -> int:
    """A descriptor that can be read from when a signal of this number has come."""
    awake, wake = os.pipe()
    for end in (awake, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(number, lambda *_: None)
    return awake


def _follow(pid: int, until: float, awake: int) -> tuple[int | None, str]:
    """Wait until the process ends; its code (negative: the signal) and "ended", "late", or "left alone"."""
    while True:
        with suppress(BlockingIOError):
            os.read(awake, 4096)
        code = _reaped().get(pid)
        if code is not None:
            return code, "ended"
        remaining = until - time.monotonic()
        if remaining <= 0:
            return None, "late"
        ready, _, _ = select.select([0, awake], [], [], remaining)
        if 0 in ready and not os.read(0, 1):
            return None, "left alone"


def _reaped() -> dict[int, int]:
    """The processes that have ended, and their codes."""
    ended = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def end_descendants() -> list[int]:
    """SIGTERM, and after a while SIGKILL, to all that descends from this process; returns what outlives that."""
    began = time.monotonic()
    told = set()
    while True:
        _reaped()
        found = descendants(os.getpid())
        waited = time.monotonic() - began
        if not found or waited > UNKILLABLE_SECONDS:
            return found
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                if waited > GRACE_SECONDS:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in told:
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)  # one that is stopped would not hear of it
            told.add(pid)
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """All processes below one, but for those that have ended and wait to be reaped."""
    below: dict[int, list[int]] = {}
    ended = set()
    for child, parent, state in _processes():
        below.setdefault(parent, []).append(child)
        if state == "Z":
            ended.add(child)
    found, todo = [], [pid]
    while todo:
        children = below.get(todo.pop(), [])
        found += children
        todo += children
    return [each for each in found if each not in ended]


def _processes() -> list[tuple[int, int, str]]:
    """Number, parent and state of each process there is."""
    if not os.path.exists("/proc/self/stat"):
        return _processes_by_ps()
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                found.append((int(name), int(parent), state))
    return found


def _processes_by_ps() -> list[tuple[int, int, str]]:
    """The same where there is no /proc."""
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,state="], stdout=subprocess.PIPE, text=True) as asked:
        rows = [line.split() for line in asked.communicate()[0].splitlines()]
    return [(int(pid), int(parent), state[0]) for pid, parent, state in rows if int(pid) != asked.pid]


if __name__ == "__main__":
    main()
