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
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Final

from flipper.errors import FlipperError, TrainingError
from flipper.training.spec import Event

# What one rank sends to the launching process.
Emit = Callable[[Event], None]

# How long the other ranks may take to fail, too, once one has: the root cause may be reported second.
GRACE_SECONDS: Final = 2.0

# A socket's path has 103 bytes at most (macOS), of which multiprocessing adds 33 to the folder's.
LONGEST_FOLDER: Final = 70

# Ranks are started by one thread at a time: see _main_left_out.
_STARTING: Final = threading.Lock()


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its number, how many there are, what device was asked for (auto, cpu, cuda),
    the rendezvous, the timeout of its process groups in seconds, and its number among those of its host."""

    rank: int
    world: int
    device: str
    rendezvous: str
    timeout: float
    local_rank: int
    local_world: int

    @property
    def joined(self) -> bool:
        """Whether torchrun started this rank, and not flipper."""
        return self.rendezvous == "env://"


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: the error, its traceback as text, and when (CLOCK_MONOTONIC, shared by all ranks)."""

    error: FlipperError
    traceback: str
    time: float


class RankTraceback(Exception):
    """The traceback of another process, shown as the cause of the error that it sent."""


Body = Callable[[Place, Emit], None]


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

    body: importable by name, with picklable contents (functools.partial of a module's function).
    timeout: seconds that a rank may wait for another, or all may be silent. limit: seconds for the whole run.
    verbose: let the ranks write to stderr; else what libraries print there is kept for the case that one dies.
    Raises the first rank's FlipperError, or TrainingError for any other end. No rank is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flipper.training.preload"])
    folder = tempfile.mkdtemp(prefix="flipper-ranks-")
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(world):
            place = Place(rank, world, device, f"file://{folder}/rendezvous", timeout, rank, world)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(body, place, theirs, None if verbose else _log(folder, rank)),
                name=f"flipper-rank-{rank}",
                daemon=False,
            )
            with _STARTING, _main_left_out(body), _sockets_in_a_short_path():
                process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        _Ranks(processes, connections, folder).follow(on_event, timeout + GRACE_SECONDS, limit)
        for done in processes:
            done.join(GRACE_SECONDS)
    finally:
        _end(processes)
        for connection in connections:
            connection.close()
        shutil.rmtree(folder, ignore_errors=True)


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
class _Ranks:
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
        while ranks and not (failures and None in failures.values()):
            until = min(each for each in (heard + silence, ending, grace) if each is not None)
            ready = wait(list(ranks), max(0.0, until - time.monotonic()))
            if not ready:
                if failures:
                    break
                raise self._late(limit if until == ending else None, silence)
            heard = time.monotonic()
            for connection in ready:
                assert isinstance(connection, Connection)
                message = _receive(connection)
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
            raise self._cause(failures)

    def _late(self, limit: float | None, silence: float) -> TrainingError:
        if limit is not None:
            return TrainingError(f"the run was ended after its limit of {limit:g} s")
        stopped = self._stopped()
        who = f"rank {stopped} is stopped" if stopped is not None else "no rank made a step or gave another sign"
        return TrainingError(f"{who}; ended after {silence:g} s of silence (--timeout sets how long)")

    def _stopped(self) -> int | None:
        """The first rank that a signal (SIGSTOP) or a debugger has stopped."""
        for rank, process in enumerate(self.processes):
            try:
                with open(f"/proc/{process.pid}/stat", encoding="utf-8") as file:
                    if file.read().rpartition(")")[2].split()[0] in ("T", "t"):
                        return rank
            except OSError:  # it has ended, or this is no Linux
                continue
        return None

    def _cause(self, failures: dict[int, Failure | None]) -> FlipperError:
        """The root cause: a rank that died without a word, one that is stopped, else the earliest error."""
        count = len(self.processes)
        for rank, failure in failures.items():
            if failure is None:
                self.processes[rank].join(GRACE_SECONDS)
                manner = _manner(self.processes[rank].exitcode)
                return TrainingError(f"rank {rank} of {count} died ({manner}){self._last_words(rank)}")
        if (stopped := self._stopped()) is not None:
            return TrainingError(f"rank {stopped} of {count} is stopped; the others gave up waiting for it (--timeout)")
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


def _receive(connection: Connection) -> object:
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
    """Kill the ranks that still run: one that is stopped, or waits for a lost one, heeds nothing else."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        process.close()


def _rank_main(body: Body, place: Place, connection: Connection, log: str | None) -> None:
    """What a rank's process runs: set up, body, tear down, and one last message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launching process's, which ends us
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _redirect(log)
    try:
        _set_up(place)
        body(place, connection.send)
        _tear_down()
    except BaseException as error:
        known = error if isinstance(error, FlipperError) else TrainingError(one_line(error))
        connection.send(Failure(known, traceback.format_exc(), time.monotonic()))
    else:
        connection.send("done")
    connection.close()


def one_line(error: BaseException) -> str:
    """The error's kind and the first line of its message; for a package that is missing, how to get it."""
    if isinstance(error, ModuleNotFoundError):
        return f"training needs {error.name}, which is not installed; pip install 'flipper-ckpt[train]'"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _exit_with_parent() -> None:
    """End this rank when the launching process is gone, killed perhaps, so that nobody trains on alone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _redirect(log: str | None) -> None:
    """Point the rank's stdout (gloo prints there) to stderr, and both to a file if there is one."""
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 2)
        os.close(file)
    os.dup2(2, 1)


def outer_place(device: str, timeout: float) -> Place | None:
    """This process's place among the ranks that torchrun has started; None when it hasn't."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names):
        return None
    rank, world, local_rank, local_world = (int(os.environ[name]) for name in names[:4])
    return Place(rank, world, device, "env://", timeout, local_rank, local_world)


def run_here(body: Body, place: Place, on_event: Emit) -> None:
    """Call `body(place, emit)` in this process, which is one of torchrun's ranks; the others do the same.

    Raises FlipperError; an end of another rank is a TrainingError here, and torchrun ends them all.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts; else cuBLAS isn't deterministic
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)  # gloo greets on stdout, which is for the record
    try:
        _set_up(place)
        body(place, on_event)
        _tear_down()
    except FlipperError:
        raise
    except Exception as error:
        raise TrainingError(f"rank {place.rank} of {place.world}: {one_line(error)}") from error
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _set_up(place: Place) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    cuda = place.device != "cpu" and torch.cuda.is_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.world,
        timeout=datetime.timedelta(seconds=place.timeout),
    )


def _tear_down() -> None:
    import torch.distributed as dist

    dist.barrier()  # nobody hangs up while another still listens
    dist.destroy_process_group()
