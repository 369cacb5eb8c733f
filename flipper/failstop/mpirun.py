"""Launches the ranks of `mpi:N` by mpirun, and follows them; who is left they agree among themselves."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import IO, Final

from flipper.errors import EndedError, FlipperError, HangError, TrainingError, UsageError
from flipper.failstop.coordinator import RankLost, heard_from, said_by_now, too_few
from flipper.failstop.messages import Dying, Shrunk
from flipper.failstop.spec import FailstopSpec
from flipper.training.launch import GRACE_SECONDS
from flipper.training.processes import is_stopped
from flipper.training.ranks import Failure
from flipper.training.spec import Event

KEY: Final = b"FLIPPER_MPI_KEY"
"""The environment variable that holds the key of the socket."""
STARTING_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 0.2

INSTALL: Final = "pip install 'flipper-ckpt[mpi]'"


@contextmanager
def launched(job: FailstopSpec, verbose: bool) -> Iterator[MpiRanks]:
    """The ranks of a job, started by mpirun and connected; ended when the context is left."""
    mpirun = _mpirun()
    folder = Path(tempfile.mkdtemp(prefix="flipper-mpi-", dir="/tmp"))  # sockets and MPI's own files: a short path
    key = secrets.token_hex(16).encode()
    process: subprocess.Popen[bytes] | None = None
    found: dict[int, Connection] = {}
    pids: dict[int, int] = {}
    try:
        with (folder / "log").open("wb") as log, Listener(str(folder / "socket"), "AF_UNIX", authkey=key) as listener:
            process = _start(mpirun, job.train.parallel.ranks, folder, key, None if verbose else log)
            for connection in _accepted(listener, job.train.parallel.ranks, process, folder):
                hello = connection.recv()
                if not hello.ulfm:
                    raise UsageError(f"this MPI has no ULFM, which mpi:N needs; {INSTALL} brings one that has")
                found[hello.rank], pids[hello.rank] = connection, hello.pid
        for connection in found.values():
            connection.send(job)
        yield MpiRanks(found, pids, process, folder)
    finally:
        _end(process, pids)
        for connection in found.values():
            connection.close()
        shutil.rmtree(folder, ignore_errors=True)


def _mpirun() -> str:
    """Where mpirun is; UsageError says what is missing."""
    if find_spec("mpi4py") is None:
        raise UsageError(f"mpi:N needs mpi4py and Open MPI; {INSTALL}")
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UsageError(f"mpi:N needs mpirun of Open MPI 5, which is not installed; {INSTALL}")
    return found


def _start(mpirun: str, ranks: int, folder: Path, key: bytes, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    command = [
        mpirun, "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none", "-n", str(ranks),
        sys.executable, "-m", "flipper.failstop.mpi_rank", str(folder / "socket"),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        KEY.decode(): key.decode(),
    }
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def _accepted(
    listener: Listener, ranks: int, process: subprocess.Popen[bytes], folder: Path
) -> Iterator[Connection]:
    """The ranks' connections; TrainingError when mpirun, or a rank, ends before all are there."""
    arrived: list[Connection] = []
    more = threading.Semaphore(0)

    def accept() -> None:
        for _ in range(ranks):
            with suppress(OSError, EOFError):
                arrived.append(listener.accept())
            more.release()

    threading.Thread(target=accept, daemon=True).start()
    deadline = time.monotonic() + STARTING_SECONDS
    whole = time.monotonic()
    for number in range(ranks):
        while not more.acquire(timeout=LOOK_SECONDS):
            if process.poll() is not None:
                raise TrainingError(f"mpirun ended with exit code {process.returncode}{_last_words(folder)}")
            if not 0 < _ranks_below(process.pid) < ranks:  # it starts all at once
                whole = time.monotonic()
            if time.monotonic() - whole > GRACE_SECONDS:  # it would wait for ever
                raise TrainingError(f"a rank of {ranks} died before all had begun{_last_words(folder)}")
            if time.monotonic() > deadline:
                raise TrainingError(f"mpirun has not started {ranks} ranks within {STARTING_SECONDS:g} s")
        if number >= len(arrived):
            raise TrainingError("a rank of MPI could not connect to the launching process")
        yield arrived[number]


def _last_words(folder: Path, most: int = 3) -> str:
    try:
        lines = (folder / "log").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    said = [" ".join(line.split())[:200] for line in lines if any(each.isalnum() for each in line)][:most]
    return f"; it wrote: {' | '.join(said)}" if said else ""


def _end(process: subprocess.Popen[bytes] | None, pids: dict[int, int]) -> None:
    """Kill what is left of the ranks, then mpirun."""
    for pid in pids.values():
        with suppress(ProcessLookupError, PermissionError):
            if _is_rank(pid):
                os.killpg(pid, signal.SIGKILL)  # mpirun has given each a group of its own: what its recipe started ends
    if process is None:
        return
    try:
        process.wait(GRACE_SECONDS)  # it ends with its ranks, and tidies up
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ranks_below(pid: int) -> int:
    """How many ranks a process has started that still run; 0 where the system doesn't tell."""
    found = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found |= set(map(int, children.read_text("ascii").split()))
    return sum(map(_is_rank, found))


def _is_rank(pid: int) -> bool:
    """Whether this is still one of our ranks: numbers are used again."""
    try:
        return b"flipper.failstop.mpi_rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@dataclass
class MpiRanks:
    """The ranks of one mpirun, as the launching process sees them.

    died: when each lost one died. doomed: those that die at the same point as one that has said so. told: those whose
    loss was told. step: the last one. begun: whether they train already; before that each imports torch by itself,
    which takes seconds.
    """

    connections: dict[int, Connection]
    pids: dict[int, int]
    process: subprocess.Popen[bytes]
    folder: Path
    died: dict[int, float] = field(default_factory=dict)
    doomed: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    step: int = 0
    begun: bool = False

    def follow(self, job: FailstopSpec, on_event: Callable[[Event], None]) -> None:
        """Until every survivor is done. Raises RankLost under "restart", else the FlipperError that ends the run."""
        at, done = dict(self.connections), False
        heard = time.monotonic()
        while at:
            silent = True
            for rank, message in heard_from(at, LOOK_SECONDS):
                heard, silent = time.monotonic(), False
                done = done or message == "done"
                if message is None and not done:
                    self._note_death(rank, at, on_event, job)
                elif message != "done":
                    self._take(rank, message, on_event, job)
            if at and self.process.poll() is not None and silent and not done:
                raise EndedError(f"mpirun has ended with exit code {self.process.returncode}, its ranks with it")
            patience = job.train.timeout if self.begun else max(job.train.timeout, STARTING_SECONDS)
            self._watch(time.monotonic() - heard, patience, at)

    def _take(self, rank: int, message: object, on_event: Callable[[Event], None], job: FailstopSpec) -> None:
        match message:
            case dict():
                self.step = message["step"] if message["event"] in ("start", "step") else self.step
                self.begun = True
                on_event(message)
            case Dying(time=when, ranks=ranks):
                self.died[rank] = when
                self.doomed.update(ranks)
            case Shrunk():
                for lost in sorted(set(self.connections) - set(message.ranks) - self.told):
                    self.told.add(lost)
                    seconds = max(0.0, message.noticed - self.died.get(lost, message.noticed))
                    on_event({"event": "rank-lost", "rank": lost, "step": message.step, "seconds_to_detect": seconds})
                on_event({
                    "event": "recovered", "strategy": job.recovery, "world_size": len(message.ranks),
                    "seconds": message.joined - message.noticed, "seconds_to_shrink": message.shrunk,
                })  # fmt: skip
            case Failure():
                raise self.cause({rank: message})

    def cause(self, failures: dict[int, Failure | None]) -> FlipperError:
        """The earliest of these errors."""
        rank, first = min(((rank, each) for rank, each in failures.items() if each), key=lambda pair: pair[1].time)
        if isinstance(first.error, TrainingError):
            return TrainingError(f"rank {rank} of {len(self.connections)}: {first.error}")
        return first.error

    def _note_death(
        self, rank: int, at: dict[int, Connection], on_event: Callable[[Event], None], job: FailstopSpec
    ) -> None:
        now = time.monotonic()
        self.died.setdefault(rank, now)
        if job.recovery is None:
            raise TrainingError(f"rank {rank} of {len(self.connections)} died{_last_words(self.folder)}")
        if job.recovery == "restart":
            for other, message in said_by_now(at):  # of the last checkpoint, too
                if isinstance(message, dict | Dying):
                    self._take(other, message, on_event, job)
            raise RankLost(self.died, self.step + 1, now, self.doomed)
        if len(at) < job.min_ranks:
            raise too_few(set(self.died), len(at), len(self.connections), job.min_ranks)

    def _watch(self, silence: float, timeout: float, at: dict[int, Connection]) -> None:
        """After so much silence, kill ranks that hang: MPI itself would wait for them for ever.

        Those that are stopped, and those that said that they would be: mpirun lets stopped ones go on.
        """
        if silence < timeout:
            return
        stopped = [rank for rank in at if rank in self.died or is_stopped(self.pids[rank])]
        for rank in stopped:
            self.died.setdefault(rank, time.monotonic())
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)
        if not stopped and silence > timeout + GRACE_SECONDS:
            raise HangError(f"no rank gave a sign; ended after {silence:g} s of silence (--timeout sets how long)")
