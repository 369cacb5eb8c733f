"""A rank of MPI, as mpirun starts it: `python -m flipper.failstop.mpi_rank ADDRESS`."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from importlib import import_module
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from flipper.errors import FlipperError, TrainingError
from flipper.failstop.messages import Hello
from flipper.failstop.mpirun import KEY
from flipper.training.ranks import Failure, Place, end_alone, one_line, sender, tell_process


def main(address: str) -> None:
    """Connect to the launching process, get the job, run it."""
    import mpi4py

    mpi4py.rc.finalize = False
    from mpi4py import MPI

    rank, world = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    folder = Path(address).parent
    try:
        tell_process(folder)  # mpirun has given each rank a process group of its own
        connection = Client(address, family="AF_UNIX", authkey=os.environb[KEY])
        ulfm = hasattr(MPI.Comm, "Revoke") and _works(MPI)
        connection.send(Hello(rank, os.getpid(), ulfm))
        job = connection.recv()
    except (EOFError, OSError):  # the launching process has ended meanwhile
        end_alone(folder)
        return
    threading.Thread(target=_end_with, args=(connection, folder), daemon=True).start()
    send = sender(connection, folder)
    try:
        import_module("flipper.training.preload")  # threads and determinism, before torch is used
        import torch

        from flipper.failstop.loop import run_through
        from flipper.failstop.mpi import MpiLeaver, MpiSurvivor

        torch.set_num_threads(1)
        place = Place(rank, world, "cpu", "mpi://", job.train.timeout, rank, world)
        kind = MpiLeaver if job.peer_copies else MpiSurvivor
        survivor = kind(place, send, job.kills, job.recovery)
        run_through(job, survivor, send, time.monotonic(), lambda: survivor)
        survivor.end()
    except BaseException as error:
        known = error if isinstance(error, FlipperError) else TrainingError(one_line(error))
        send(Failure(known, traceback.format_exc(), time.monotonic()))
    else:
        send("done")
    sys.stderr.flush()
    os._exit(0)


def _works(mpi: Any) -> bool:
    """Whether this MPI knows ULFM; mpi4py has its names for any MPI."""
    comm = mpi.COMM_WORLD.Dup()
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    try:
        comm.Agree(1)
    except (mpi.Exception, NotImplementedError):
        return False
    return True


def _end_with(connection: Connection, folder: Path) -> None:
    """End this rank when the launching process is gone."""
    try:
        connection.recv()
    except (EOFError, OSError):
        end_alone(folder)


if __name__ == "__main__":
    main(sys.argv[1])
