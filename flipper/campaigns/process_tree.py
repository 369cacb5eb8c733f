"""Process trees: commands that run to their end, or to a limit, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flipper.campaigns import keeper
from flipper.errors import TrainingError, UsageError

_RUNNING: Final[set[subprocess.Popen[bytes]]] = set()
_CHANGING: Final = threading.Lock()


@dataclass(frozen=True)
class Ended:
    """How a command ended. code: its exit code, negative for a signal, None when its time was up. seconds: it took."""

    code: int | None
    seconds: float

    @property
    def manner(self) -> str:
        """In words."""
        if self.code is None:
            return f"ended after {self.seconds:.0f} s"
        if self.code >= 0:
            return f"exit code {self.code}"
        with suppress(ValueError):
            return f"killed by {signal.Signals(-self.code).name}"
        return f"killed by signal {-self.code}"


def run_command(
    words: Sequence[str], *, cwd: Path, log: Path, timeout: float, scratch: Path, env: Mapping[str, str] | None = None
) -> Ended:
    """Run a command without a shell, and end all that it started when it ends or `timeout` seconds are over.

    What detached itself is ended too: on Linux in every case, elsewhere unless it was orphaned. If this process is
    killed, the command is ended as well and `scratch` removed. cwd: its folder. log: takes its stdout and stderr.
    env: what differs from this process' environment. Raises UsageError when it can't be started, TrainingError when
    processes of it can't be ended.
    """
    job = {"words": list(words), "cwd": str(cwd), "env": dict(env or {}), "log": str(log), "timeout": timeout}
    arguments = [sys.executable, "-I", "-S", keeper.__file__, json.dumps({**job, "scratch": str(scratch)})]
    with _CHANGING:
        process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=os.sep
        )  # a session of its own: Ctrl-C is for the campaign, which then ends it
        _RUNNING.add(process)
    try:
        assert process.stdout is not None
        told = process.stdout.read()
    finally:
        _end(process)
    if not told:
        raise TrainingError(f"{words[0]} was ended with the process that watched over it")
    answer = json.loads(told)
    if "error" in answer:
        raise UsageError(f"can't run {answer['error']}")
    if answer["left"]:
        raise TrainingError(f"{words[0]}: its processes {answer['left']} can't be ended, even by SIGKILL")
    return Ended(None if answer["timed_out"] else answer["code"], answer["seconds"])


def end_all() -> None:
    """End every command of this process that still runs, and wait until it is gone."""
    with _CHANGING:
        running = list(_RUNNING)
    for process in running:
        _close(process)
    for process in running:
        process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    _close(process)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    with _CHANGING:
        _RUNNING.discard(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    """Tell a keeper that nobody waits for its command any more."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
