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


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its number, how many there are, what device was asked for (auto, cpu, cuda),
    the rendezvous, and the timeout of its process groups in seconds."""

    rank: int
    world: int
    device: str
    rendezvous: str
    timeout: float


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
    verbose: bool = False,
) -> None:
    """Call `body(place, emit)` on `world` fresh processes and hand what they emit to `on_event`.

    body: importable by name, with picklable contents (functools.partial of a module's function).
    verbose: let the ranks write to stderr; else what libraries print there is dropped.
    Raises the first rank's FlipperError, or TrainingError for any other end. No rank is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flipper.training.preload"])
    folder = tempfile.mkdtemp(prefix="flipper-ranks-")
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(world):
            place = Place(rank, world, device, f"file://{folder}/rendezvous", timeout)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(body, place, theirs, verbose),
                name=f"flipper-rank-{rank}",
                daemon=False,
            )
            with _main_left_out(body):
                process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        _follow(processes, connections, on_event)
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


def _follow(processes: list[BaseProcess], connections: list[Connection], on_event: Emit) -> None:
    """Pass events on until every rank is done; on the first failure raise what caused it."""
    ranks = {connection: rank for rank, connection in enumerate(connections)}
    failures: dict[int, Failure | None] = {}
    deadline: float | None = None
    while ranks and not (failures and None in failures.values()):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(ranks), left)
        if not ready:
            break
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
                deadline = deadline or time.monotonic() + GRACE_SECONDS
    if failures:
        raise _cause(failures, processes)


def _receive(connection: Connection) -> object:
    """One message of a rank: an event, "done", a Failure, or None when it ended without a word."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _cause(failures: dict[int, Failure | None], processes: list[BaseProcess]) -> FlipperError:
    """The root cause: a rank that died without a word, else the earliest error."""
    for rank, failure in failures.items():
        if failure is None:
            processes[rank].join(GRACE_SECONDS)
            return TrainingError(f"rank {rank} of {len(processes)} died ({_manner(processes[rank].exitcode)})")
    rank, first = min(((rank, failure) for rank, failure in failures.items() if failure), key=lambda pair: pair[1].time)
    if isinstance(first.error, TrainingError) and len(processes) > 1:
        error: FlipperError = TrainingError(f"rank {rank} of {len(processes)}: {first.error}")
    else:
        error = first.error
    error.__cause__ = RankTraceback(f"\n{first.traceback}")
    return error


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


def _rank_main(body: Body, place: Place, connection: Connection, verbose: bool) -> None:
    """What a rank's process runs: set up, body, tear down, and one last message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launching process's, which ends us
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _quieten(verbose)
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


def _quieten(verbose: bool) -> None:
    """Point the rank's stdout (gloo prints there) to stderr, and both to nowhere unless verbose."""
    if verbose:
        os.dup2(2, 1)
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


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
