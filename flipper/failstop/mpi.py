"""MPI with ULFM: survivors that talk by mpi4py, and agree among themselves who is left.

User Level Failure Mitigation is a part of MPI 5: a collective that a dead process takes part in raises an error, the
communicator is revoked, and shrunk to those that live (Bland, Bouteiller, Herault, Bosilca, Dongarra, 2013).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from flipper.errors import TrainingError
from flipper.failstop.kills import Kill
from flipper.failstop.messages import Lost, Plan, Shrunk, plan_of
from flipper.failstop.survivor import Sum, Survivor
from flipper.training.layouts import Parallel
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.reduction import added, padded_for
from flipper.training.ranks import Place

T = TypeVar("T")


@dataclass(frozen=True)
class MpiGrid(Grid):
    """Ranks of MPI, each with a whole replica; there is no mesh of torch's. comm: all that are left."""

    comm: Any = None

    def everyone(self, mine: T) -> list[T]:
        said: list[T] = self.comm.allgather(mine)
        return said

    def stacked(self, mine: Tensor) -> Tensor:
        everyone = mine.new_empty((self.world, len(mine)))
        self.comm.Allgather(_bytes(mine), _bytes(everyone))
        return everyone


class MpiSum:
    """As reduction.OrderedSum; MPI gets on only while it is called, so each part is done whole."""

    def __init__(self, flat: Tensor, comm: Any) -> None:
        self._size, self._comm = flat.numel(), comm
        padded = padded_for(flat, comm.size)
        self._slices = torch.empty_like(padded)
        comm.Alltoall(_bytes(padded), _bytes(self._slices))

    def gather(self) -> None:
        """Hand round the sum of this rank's slice."""
        self._whole = torch.empty_like(self._slices)
        self._comm.Allgather(_bytes(added(self._slices, self._comm.size)), _bytes(self._whole))

    def result(self) -> Tensor:
        """The sum."""
        return self._whole[: self._size]


class MpiSurvivor(Survivor):
    """A rank of MPI. recovery: as in FailstopSpec."""

    def __init__(
        self, place: Place, send: Callable[[object], None], kills: tuple[Kill, ...], recovery: str | None
    ) -> None:
        super().__init__(place, send, kills)
        self._recovery = recovery
        self._comm: Any = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)

    def grid(self, parallel: Parallel, device: torch.device) -> Grid:
        place = self.place
        mesh: Any = None
        return MpiGrid(replace(parallel, data_size=place.world), place.rank, device, mesh, self._comm)

    def meet(self) -> None:
        self._comm.Barrier()

    def begin_sum(self, flat: Tensor) -> Sum:
        return MpiSum(flat, self._comm)

    def share(self, tensor: Tensor, rank: int) -> None:
        self._comm.Bcast(_bytes(tensor), root=rank)

    def told(self, mine: Tensor, shared: Tensor) -> Tensor:
        everyone = mine.new_empty((self._comm.size, len(mine)))
        self._comm.Allgather(_bytes(mine), _bytes(everyone))
        self.share(shared, 0)
        return everyone

    def recover(self, report: Callable[[int], Lost]) -> Plan:
        """Revoke, agree, shrink; then all that are left tell where they are, and each works out the same plan."""
        noticed = time.monotonic()
        said: list[tuple[int, Lost]] = []
        while not said:
            _tried(self._comm.Revoke)
            _tried(self._comm.Ack_failed)
            _tried(self._comm.Agree, 1)
            began = time.monotonic()
            self._comm = self._comm.Shrink()
            shrunk = time.monotonic() - began
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)
            self.generation += 1
            self._die_in_recovery()
            heard = _tried(self._comm.allgather, (self.origin, report(self.generation)))
            if _tried(self._comm.Agree, int(heard is not None)):  # the same answer everywhere
                said = heard or []
        plan = plan_of(self.generation, self._recovery or "", dict(said))
        self.ranks = plan.ranks
        self.place = replace(self.place, rank=plan.ranks.index(self.origin), world=len(plan.ranks))
        if self.place.rank == 0:
            step = max(lost.completed for _, lost in said) + 1
            first = min(noticed, *(lost.time for _, lost in said))
            self._send(Shrunk(plan.ranks, step, first, time.monotonic(), shrunk))
        return plan

    def passed(self, mine: Tensor, distance: int, into: Tensor | None) -> Tensor:
        """As peers.Ring.passed."""
        after, before = ((self.place.rank + sign * distance) % self.place.world for sign in (1, -1))
        try:
            length = self._comm.sendrecv(mine.numel(), dest=after, source=before)
            if into is None or into.numel() != length:
                into = torch.empty(length, dtype=torch.uint8)
            self._comm.Sendrecv(_bytes(mine), after, recvbuf=_bytes(into), source=before)
        except MPI.Exception:
            self.revoke()
            raise
        return into

    def revoke(self) -> None:
        """Have all that wait for anyone in this group learn that it is broken."""
        _tried(self._comm.Revoke)

    def end(self) -> None:
        """Meet, and go: MPI's own end hangs where a process has died."""
        _tried(self._comm.Barrier)


class MpiLeaver(MpiSurvivor):
    """As loop.GlooLeaver."""

    def recover(self, report: Callable[[int], Lost]) -> Plan:
        """Raises TrainingError."""
        self.revoke()
        raise TrainingError("contact was lost")


def _tried(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call gives; None when it finds that another process is gone."""
    try:
        return call(*arguments)
    except MPI.Exception:
        return None


def _bytes(tensor: Tensor) -> list[Any]:
    """The tensor's own memory as MPI takes it, for any dtype."""
    memory: np.ndarray[Any, Any] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return [memory, MPI.BYTE]
