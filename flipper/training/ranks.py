"""What runs on a rank: set-up, body and tear-down, in a process that flipper forked or that torchrun started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flipper.errors import FlipperError, TrainingError, UsageError
from flipper.training.processes import started_at
from flipper.training.recipes import user
from flipper.training.spec import Event

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# What one rank sends to the launching process.
Emit = Callable[[Event], None]

_PID: Final = "pid-"
"""What the name of the file begins with by which a rank tells the others its process."""

_END_ALL: Final = f"""
mv "$0" "$0-ended"
for told in "$0-ended/{_PID}"*; do
    told=${{told##*/{_PID}}} pid=${{told%-*}}
    if read -r stat < "/proc/$pid/stat"; then
        set -- ${{stat##*) }}
        [ "${{20}}" = "${{told#*-}}" ] || continue
    fi
    kill -s KILL -- "-$pid"
done
rm -rf "$0-ended" || {{ sleep 1; rm -rf "$0-ended"; }}
"""
"""For sh: end the ranks that have told their processes in the folder $0, and what they have started; remove it.

But for those whose numbers other processes have by now, which is seen by when these started. Renamed at first: a rank
that has not told its process by then finds no folder, and ends. One that has may hang, for torch's FileStore keeps
Python's lock while it waits for a folder that is gone, and is killed here.
"""

_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, and users' other tools set in part."""


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

    @property
    def folder(self) -> Path | None:
        """Of the ranks that flipper started: where they meet."""
        place = self.rendezvous.removeprefix("file://")
        return None if place == self.rendezvous else Path(place).parent


Body = Callable[[Place, Emit], None]


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: the error, its traceback as text, and when (CLOCK_MONOTONIC, shared by all ranks)."""

    error: FlipperError
    traceback: str
    time: float


def rank_main(body: Body, place: Place, connection: Connection, log: str | None) -> None:
    """What a rank's process runs: set up, body, tear down, and one last message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launching process's, which ends us
    # Linux shares the processors out by session first: two ranks in one took 14.9 ms a step, in their own 13.6.
    os.setsid()
    try:
        if place.folder is not None:
            tell_process(place.folder)
        _redirect(log)
    except FileNotFoundError:  # the launching process has ended, and its folder with it, before this one was forked
        os._exit(1)
    threading.Thread(target=_exit_with_parent, args=(place.folder,), daemon=True).start()
    send = sender(connection, place.folder)
    code = 1
    try:
        _set_up(place)
        body(place, send)
        _meet()
    except BaseException as error:
        known = error if isinstance(error, FlipperError) else TrainingError(one_line(error))
        send(Failure(known, traceback.format_exc(), time.monotonic()))
    else:
        send("done")
        code = 0
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking the group down may deadlock: gloo's thread waits for Python's lock to free a tensor, and the one that holds
    # it for that thread (seen with torch 2.13 under load). The process's end takes all down.
    os._exit(code)


def sender(connection: Connection, folder: Path | None) -> Callable[[Any], None]:
    """How a rank tells the launching process something; when that is gone, the rank ends as end_alone says."""

    def send(message: object) -> None:
        try:
            connection.send(message)
        except ConnectionError:
            end_alone(folder)

    return send


def one_line(error: BaseException, *where: str) -> str:
    """The error's kind, the first line of its message, and where it came up: in a user's recipe, and what is given.

    For a package that is missing, how to get it.
    """
    places = [place for place in (user.place(error), *where) if place]
    ending = f" ({'; '.join(places)})" if places else ""
    if isinstance(error, ModuleNotFoundError):
        return f"training needs {error.name}, which is not installed; pip install 'flipper-ckpt[train]'{ending}"
    lines = str(error).strip().splitlines()
    if lines and lines[0].endswith(":") and error.__cause__ is not None:  # torch's pipelines list tensors there
        return one_line(error.__cause__, *where)
    return (f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__) + ending


def _exit_with_parent(folder: Path | None) -> None:
    """End this rank when the launching process is gone: nobody trains on alone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        end_alone(folder)


def tell_process(folder: Path) -> None:
    """Tell the others which process this is: they may outlive the one that knows all.

    Raises FileNotFoundError when that one has ended, and the folder with it.
    """
    told = folder / f"{_PID}{os.getpid()}-{started_at(os.getpid())}"
    told.touch()
    told.stat()  # a folder that is just being renamed would take it, unseen by the one that ends all


def end_alone(folder: Path | None) -> None:
    """End this rank, and what its recipe has started, where nobody is left to end it.

    Nor does anybody stay: not a rank that can't end itself, as one that is stopped, nor the folder of all. Each rank
    has that done by a process of its own: ranks end each other on the way, and a stop may strike in the midst of it.
    """
    try:
        if folder is not None:
            subprocess.Popen(
                ["/bin/sh", "-c", _END_ALL, folder],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
    finally:  # whatever comes up
        os.killpg(0, signal.SIGKILL)  # the group is this rank's own


def _redirect(log: str | None) -> None:
    """Point the rank's stdout (gloo prints there) to stderr, and both to a file if there is one."""
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 2)
        os.close(file)
    os.dup2(2, 1)


def outer_rank() -> int | None:
    """This process's number among the ranks that torchrun has started; None when it hasn't.

    Raises UsageError when what torchrun sets is there, but makes no sense.
    """
    if not all(name in os.environ for name in _TORCHRUN):
        return None
    for name in _TORCHRUN:
        value = os.environ[name]
        if name != "MASTER_ADDR" and not (value.isascii() and value.isdigit()):
            raise UsageError(f"{name} in the environment is {value!r}, not a number as torchrun sets it; unset it")
    for number, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if int(os.environ[number]) >= int(os.environ[count]):
            raise UsageError(
                f"{number} in the environment is {os.environ[number]}, of {count} {os.environ[count]} ranks; unset both"
            )
    return int(os.environ["RANK"])


def outer_place(device: str, timeout: float) -> Place | None:
    """This process's place among the ranks that torchrun has started; None when it hasn't; UsageError as above."""
    if outer_rank() is None:
        return None
    rank, world, local_rank, local_world = (int(os.environ[name]) for name in _TORCHRUN[:4])
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
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    make_group(place)


def make_group(place: Place, store: Store | None = None) -> None:
    """Make the process group of all ranks: gloo, and nccl beside it where ranks compute on GPUs; a collective.

    store: where the ranks meet; by default at their rendezvous.
    """
    import datetime

    import torch
    import torch.distributed as dist

    cuda = place.device != "cpu" and torch.cuda.is_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=place.rendezvous if store is None else None,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=datetime.timedelta(seconds=place.timeout),
    )


def _tear_down() -> None:
    import torch.distributed as dist

    _meet()
    dist.destroy_process_group()


def _meet() -> None:
    """Wait for all ranks: nobody hangs up while another still listens."""
    import torch.distributed as dist

    dist.barrier()
