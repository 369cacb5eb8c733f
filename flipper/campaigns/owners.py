"""Owners: which process a lock or a scratch folder belongs to, and whether that one is still there."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from flipper.errors import DAMAGED
from flipper.training.processes import stat

_UNTOLD: Final = "running"
"""Of a process whose start can't be seen."""

_TAG: Final = re.compile(r"([0-9a-f]{6})-(\d+)-(\w+)")


@dataclass(frozen=True)
class Owner:
    """A process. host: its host's name. started: when it began, in clock ticks since boot: numbers are used again."""

    host: str
    process: int
    started: str

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return _this(os.getpid())

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """The one that a file names; None where it can't be told."""
        if not path.is_file():  # a pipe would be waited for
            return None
        with suppress(*DAMAGED):
            record = json.loads(path.read_text("utf-8"))
            return cls(str(record["host"]), int(record["process"]), str(record["started"]))
        return None

    def text(self) -> str:
        """What `read` reads."""
        return json.dumps(asdict(self))

    @property
    def tag(self) -> str:
        """For file names: host (shortened), process and start."""
        return f"{_short(self.host)}-{self.process}-{self.started}"

    @property
    def gone(self) -> bool:
        """Whether it has ended for sure: it was of this host, and is no more. Of other hosts nothing is known."""
        return self.host == socket.gethostname() and _ended(self.process, self.started)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def gone(tag: str) -> bool:
    """Whether the process that a tag names has ended for sure; False for any other text."""
    found = _TAG.fullmatch(tag)
    return found is not None and found[1] == _short(socket.gethostname()) and _ended(int(found[2]), found[3])


def _ended(process: int, when: str) -> bool:
    found = _started(process)
    return found is None or (found != when and _UNTOLD not in (found, when))


def _started(process: int) -> str | None:
    """When a process of this machine began; None when there is none, or when it only waits to be reaped."""
    if found := stat(process):
        return None if found[0] in "ZX" else found[19]
    try:
        os.kill(process, 0)  # without /proc, or where it hides the processes of others
    except (ProcessLookupError, OverflowError):  # the latter of a number that no process can have
        return None
    except OSError:
        pass
    return _UNTOLD


@functools.cache
def _this(process: int) -> Owner:
    return Owner(socket.gethostname(), process, _started(process) or _UNTOLD)


def _short(host: str) -> str:
    return hashlib.sha256(host.encode()).hexdigest()[:6]
