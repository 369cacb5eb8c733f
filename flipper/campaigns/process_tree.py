"""Process trees: commands that run to their end, or to a limit, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from flipper.campaigns import keeper
from flipper.errors import EndedError, TrainingError, UsageError
from flipper.training.launch import STOP


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
    env: what differs from this process' environment. Raises UsageError when it can't be started, CancelledError when
    the run is called off, TrainingError when processes of it can't be ended, EndedError when its keeper was.
    """
    job = {"words": list(words), "cwd": str(cwd), "env": dict(env or {}), "log": str(log), "timeout": timeout}
    arguments = [sys.executable, "-I", "-S", keeper.__file__, json.dumps({**job, "scratch": str(scratch)})]
    told = _told_by(arguments)
    if not told:
        raise EndedError(f"{words[0]} was ended with the process that watched over it")
    answer = json.loads(told)
    if "error" in answer:
        raise UsageError(f"can't run {answer['error']}")
    if answer["left"]:
        raise TrainingError(f"{words[0]}: its processes {answer['left']} can't be ended, even by SIGKILL")
    return Ended(None if answer["timed_out"] else answer["code"], answer["seconds"])


def _told_by(arguments: Sequence[str]) -> bytes:
    """What a keeper prints; it ends its command when its stdin is closed, as it is if this process dies."""
    stop = STOP.get()
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=os.sep
    ) as process:  # a session of its own: Ctrl-C is for the campaign, which then ends it
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if stop in wait([process.stdout.fileno(), *([] if stop is None else [stop])]):
                raise CancelledError("the run was called off")
            return process.stdout.read()
        finally:
            process.stdin.close()
