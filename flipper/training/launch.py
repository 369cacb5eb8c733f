"""Runs one function on N local ranks, each forked from a server process that has imported torch already.

The server (multiprocessing's forkserver) holds no process group, store or thread, so that a fork is safe
whatever the caller has done; importing torch costs seconds, forking from it milliseconds.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Final

from flipper.errors import EndedError, FlipperError, HangError, StartError, TrainingError
from flipper.training.processes import is_stopped, started_at
from flipper.training.ranks import Body, Emit, Failure, Place, rank_main
from flipper.training.spec import Event

# How long the other ranks may take to fail, too, once one has: the root cause may be reported second.
GRACE_SECONDS: Final = 2.0

# A socket's path has 103 bytes at most (macOS), of which multiprocessing adds 33 to the folder's.
LONGEST_FOLDER: Final = 70

STOP: Final[ContextVar[Connection | None]] = ContextVar("flipper_stop", default=None)
"""What can be read from once this thread's runs are to end at once; see Pool.call_off."""

ASKING: Final = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU))
"""Signals by which a user, a batch system or a limit ends a process, and never its own computation."""

_TUNABLES: Final = "GLIBC_TUNABLES"

# Ranks are started by one thread at a time: see _main_left_out.
_STARTING: Final = threading.Lock()


class RankTraceback(Exception):
    """The traceback of another process, shown as the cause of the error that it sent."""


def run_ranks(
    body: Body,
    world: int,
    on_event: Callable[[Event], None],
    *,
    device: str = "cpu",
    timeout: float = 300.0,
    limit: float | None = None,
    verbose: bool = False,
) -> None:
    """Call `body(place, emit)` on `world` fresh processes and hand what they emit to `on_event`.

    limit: seconds for the whole run. Others, and what body may be: see `started`.
    Raises the first rank's FlipperError, or TrainingError for any other end, EndedError for one by somebody's signal;
    CancelledError when it is called off. No rank is left behind.
    """
    with started(body, world, device=device, timeout=timeout, verbose=verbose) as ranks:
        ranks.follow(on_event, timeout + GRACE_SECONDS, limit)


@contextmanager
def started(
    body: Body, world: int, *, device: str = "cpu", timeout: float = 300.0, verbose: bool = False
) -> Iterator[Ranks]:
    """Fresh processes that call `body(place, emit)`, one a rank; they are ended when the context is left.

    body: importable by name, with picklable contents (functools.partial of a module's function).
    timeout: seconds that a rank may wait for another, or all may be silent.
    verbose: let the ranks write to stderr; else what libraries print there is kept for the case that one dies.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flipper.training.preload"])
    with _lack_is_told(world):
        folder = tempfile.mkdtemp(prefix="flipper-ranks-")
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(world):
            place = Place(rank, world, device, f"file://{folder}/rendezvous", timeout, rank, world)
            log = None if verbose else _log(folder, rank)
            _check_called_off()
            with _lack_is_told(world), _STARTING, _ready_to_start(body):
                ours, theirs = context.Pipe(duplex=False)
                connections.append(ours)
                process = context.Process(
                    target=rank_main, args=(body, place, theirs, log), name=f"flipper-rank-{rank}", daemon=False
                )
                process.start()
                processes.append(process)
                theirs.close()
        yield Ranks(processes, connections, folder)
        for done in processes:
            done.join(GRACE_SECONDS)
    finally:
        _end(processes)
        for connection in connections:
            connection.close()
        shutil.rmtree(folder, ignore_errors=True)


def _check_called_off() -> None:
    stop = STOP.get()
    if stop is not None and stop.poll():
        raise CancelledError("the run was called off")


@contextmanager
def _lack_is_told(world: int) -> Iterator[None]:
    """Say what there was too little of to start the ranks: files, memory, processes."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise EndedError("ranks can't be forked: somebody has ended the server that does") from error
    except OSError as error:
        raise StartError(f"can't start {world} ranks: {error.strerror or error}") from error


@contextmanager
def _ready_to_start(body: Body) -> Iterator[None]:
    """What starting a rank, and with the first one the server, needs around it."""
    with _main_left_out(body), _sockets_in_a_short_path(), _children_allowed():
        _start_server()
        with _server_that_answers():
            yield


@contextmanager
def _children_allowed() -> Iterator[None]:
    """Let a daemonic process, as dask's and other pools' workers are, start ranks.

    The ban is against children that outlive their parent, and ranks end with theirs: see ranks._exit_with_parent.
    """
    settings: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    usual = settings.get("daemon", False)
    settings["daemon"] = False
    try:
        yield
    finally:
        settings["daemon"] = usual


def _start_server() -> None:
    """Start the server, if there is none, with Ctrl-C blocked: it would show a traceback while it imports."""
    _end_server_at_exit(os.getpid())
    resource_tracker.ensure_running()  # which the server needs, and whose start unblocks it
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _huge_pages():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextmanager
def _huge_pages() -> Iterator[None]:
    """Have glibc ask for huge pages in what is started.

    Of the 300 MB that ranks share with the server fewer pages are to be mapped and unmapped then: a rank is forked some
    10 ms sooner, and its death, which others see when its memory is gone, some 5 ms.
    """
    usual = os.environ.get(_TUNABLES)
    os.environ[_TUNABLES] = ":".join(filter(None, (usual, "glibc.malloc.hugetlb=1")))
    try:
        yield
    finally:
        if usual is None:
            del os.environ[_TUNABLES]
        else:
            os.environ[_TUNABLES] = usual


@functools.cache
def _end_server_at_exit(process: int) -> None:
    """End the server with this process (of that number), once its ranks have ended: importing, it would outlast it."""
    util.Finalize(None, _end_server, exitpriority=-50)


def _end_server() -> None:
    if (pid := _server()) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # one that is stopped heeds nothing else


def _server() -> int | None:
    """The server's process, if there is one."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


@contextmanager
def _server_that_answers() -> Iterator[None]:
    """Inside, what the server is asked comes to an end, though somebody has stopped it: then the server is ended."""
    done = threading.Event()

    def watch() -> None:
        stopped = 0
        while not done.wait(GRACE_SECONDS):
            stopped = stopped + 1 if is_stopped(_server()) else 0
            if stopped > 1:  # not on its way to go on with all of the job, as after a batch system's suspension
                _end_server()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _server_has_ended() -> bool:
    """Whether somebody has ended the server, or is about to: its files close before it is gone.

    It isn't reaped, which multiprocessing does itself.
    """
    pid = _server()
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        while pid is not None and time.monotonic() < deadline:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            time.sleep(0.01)
    except ChildProcessError:
        return True
    return False


@contextmanager
def _main_left_out(body: Body) -> Iterator[None]:
    """Keep multiprocessing from running the caller's script once more in each rank, unless the body is in it.

    So a script needs no `if __name__ == "__main__":`, and may come from stdin.
    """
    function = body.func if isinstance(body, functools.partial) else body
    main = sys.modules["__main__"]
    if function.__module__ != "__main__":
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _sockets_in_a_short_path() -> Iterator[None]:
    """Have multiprocessing put its sockets into /tmp where TMPDIR, as batch systems set it, is too long for them."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = usual


def _log(folder: str, rank: int) -> str:
    """Where a rank's stdout and stderr go."""
    return os.path.join(folder, f"rank-{rank}.log")


@dataclass
class Ranks:
    """The ranks of one run, as the launching process sees them."""

    processes: list[BaseProcess]
    connections: list[Connection]
    folder: str

    def follow(self, on_event: Emit, silence: float, limit: float | None) -> None:
        """Pass events on until every rank is done; on the first failure raise what caused it.

        silence: seconds without a word from anyone that mean a hang. limit: seconds until the run is ended.
        """
        ranks = {connection: rank for rank, connection in enumerate(self.connections)}
        failures: dict[int, Failure | None] = {}
        ending = None if limit is None else time.monotonic() + limit
        heard = time.monotonic()
        grace: float | None = None
        stop = STOP.get()
        stops = [] if stop is None else [stop]
        while ranks and not (failures and None in failures.values()):
            until = min(each for each in (heard + silence, ending, grace) if each is not None)
            ready = wait([*ranks, *stops], max(0.0, until - time.monotonic()))
            if stop in ready:
                raise CancelledError("the run was called off")
            if not ready:
                if failures:
                    break
                raise self._late(limit if until == ending else None, silence)
            heard = time.monotonic()
            for connection in ready:
                assert isinstance(connection, Connection)
                message = receive(connection)
                if isinstance(message, dict):
                    if not failures:
                        on_event(message)
                    continue
                rank = ranks.pop(connection)
                if message != "done":
                    assert message is None or isinstance(message, Failure)
                    failures[rank] = message
                    grace = grace or time.monotonic() + GRACE_SECONDS
        if failures:
            raise self.cause(failures)

    def _late(self, limit: float | None, silence: float) -> HangError:
        if limit is not None:
            return HangError(f"the run was ended after its limit of {limit:g} s")
        stopped = self._stopped()
        who = f"rank {stopped} is stopped" if stopped is not None else "no rank made a step or gave another sign"
        return HangError(f"{who}; ended after {silence:g} s of silence (--timeout sets how long)")

    def _stopped(self) -> int | None:
        """The first rank that a signal (SIGSTOP) or a debugger has stopped."""
        return next((rank for rank in range(len(self.processes)) if self.is_stopped(rank)), None)

    def is_stopped(self, rank: int) -> bool:
        """As the function of this name, of a rank."""
        return is_stopped(self.processes[rank].pid)

    @property
    def place(self) -> Path:
        """The folder of the ranks' rendezvous."""
        return Path(self.folder)

    def cause(self, failures: dict[int, Failure | None]) -> FlipperError:
        """The root cause: a rank that died without a word, one that is stopped, else the earliest error."""
        count = len(self.processes)
        for rank, failure in failures.items():
            if failure is None:
                self.processes[rank].join(GRACE_SECONDS)
                code = self.processes[rank].exitcode
                if code == 255 and _server_has_ended():  # which would have told the exit code
                    return EndedError(f"rank {rank} of {count} was ended, and the server that had forked it")
                kind = EndedError if code is not None and -code in ASKING else TrainingError
                return kind(f"rank {rank} of {count} died ({_manner(code)}){self._last_words(rank)}")
        if (stopped := self._stopped()) is not None:
            return HangError(f"rank {stopped} of {count} is stopped; the others gave up waiting for it (--timeout)")
        rank, first = min(
            ((rank, failure) for rank, failure in failures.items() if failure), key=lambda pair: pair[1].time
        )
        error = first.error
        if isinstance(first.error, TrainingError) and count > 1:
            error = TrainingError(f"rank {rank} of {count}: {first.error}")
        error.__cause__ = RankTraceback(f"\n{first.traceback}")
        return error

    def _last_words(self, rank: int, most: int = 3) -> str:
        """The last lines that a rank wrote, without gloo's greetings."""
        try:
            with open(_log(self.folder, rank), encoding="utf-8", errors="replace") as file:
                lines = [line.strip() for line in file.read()[-4000:].splitlines()]
        except OSError:
            return ""
        said = [line[:200] for line in lines if line and not line.startswith("[Gloo]")][-most:]
        return f"; it last wrote: {' | '.join(said)}" if said else ""


def receive(connection: Connection) -> object:
    """One message of a rank: an event, "done", a Failure, or None when it ended without a word."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _manner(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        try:
            return f"killed by {signal.Signals(-exitcode).name}"
        except ValueError:
            return f"killed by signal {-exitcode}"
    return "still running, but its pipe is closed" if exitcode is None else f"exit code {exitcode}"


def _end(processes: list[BaseProcess]) -> None:
    """Kill the ranks that still run, and what the recipes of all that did not end well have started.

    Each leads a process group. One that is stopped, or waits for a lost one, heeds nothing else.
    """
    for process in processes:
        if process.pid is not None and process.exitcode != 0 and not _is_anothers(process):
            with suppress(ProcessLookupError, PermissionError):  # it may not lead one yet, or nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    with _server_that_answers():  # it is the server that tells of their ends
        for process in processes:
            process.join()
            process.close()


def _is_anothers(process: BaseProcess) -> bool:
    """Whether this process has ended, and its number is used again; not while any of its group is left."""
    return process.exitcode is not None and started_at(process.pid) != ""
