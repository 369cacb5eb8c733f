"""A survivor: this rank among those that are left, how they talk, and what it does when contact is lost."""

from __future__ import annotations

import datetime
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from flipper.errors import TrainingError
from flipper.failstop.kills import SIGNALS, Kill
from flipper.failstop.messages import Dying, Joined, Lost, Plan, Ready, await_leave, await_plan, await_port, tell_port
from flipper.training.launch import GRACE_SECONDS
from flipper.training.layouts import Parallel
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.reduction import OrderedSum
from flipper.training.ranks import Place, make_group

JOINING_SECONDS: Final = 2.0
"""To make the survivors' group: all are there already. When one dies meanwhile, gloo tries its address five times."""


class Sum(Protocol):
    """Everyone's vectors being summed in rank order; see reduction.OrderedSum."""

    def gather(self) -> None:
        """Second part."""

    def result(self) -> Tensor:
        """Third part: the sum."""


class Survivor(ABC):
    """This rank. All but `grid`, `meet_and_die` and `recover` raise RuntimeError when another rank is lost.

    origin: its number at the start. place: as it is now. ranks: the numbers at the start of all that are left, in the
    order of their new ones. generation: how many groups there were before this one.
    """

    def __init__(self, place: Place, send: Callable[[object], None], kills: tuple[Kill, ...]) -> None:
        """send: to the launching process."""
        self.origin = place.rank
        self.place = place
        self.ranks = tuple(range(place.world))
        self.generation = 0
        self.kills = kills
        self._send = send

    @abstractmethod
    def grid(self, parallel: Parallel, device: torch.device) -> Grid:
        """The ranks that are left."""

    @abstractmethod
    def meet(self) -> None:
        """Wait for all."""

    @abstractmethod
    def begin_sum(self, flat: Tensor) -> Sum:
        """Begin to sum everyone's vector; the parts of several sums are done in the same order everywhere."""

    @abstractmethod
    def share(self, tensor: Tensor, rank: int) -> None:
        """Fill the tensor with that of one rank."""

    @abstractmethod
    def told(self, mine: Tensor, shared: Tensor) -> Tensor:
        """Everyone's vector, by rank; `shared`, bytes, is filled with those of rank 0 meanwhile."""

    @abstractmethod
    def recover(self, report: Callable[[int], Lost]) -> Plan:
        """Join the others that are left; what this rank does then is plan.actions[rank].

        report: where this rank is, given the generation that broke. The caller has let go of all that hangs on it.
        """

    def meet_and_die(self, step: int, bucket: int | None = None) -> None:
        """Where a kill is due: meet, so that all have come exactly as far; who is to die ends, the others notice."""
        if due := self.due(step, bucket):
            self.meet()
            self._die_by(due)
            self.meet()

    def due(self, step: int, bucket: int | None = None) -> list[Kill]:
        """The kills that are due now, here or on other ranks."""
        return [kill for kill in self.kills if (kill.step, kill.bucket) == (step, bucket) and kill.rank in self.ranks]

    def _die_in_recovery(self) -> None:
        self._die_by([kill for kill in self.kills if kill.recovery == self.generation])

    def _die_by(self, kills: list[Kill]) -> None:
        for kill in kills:
            if kill.rank == self.origin:
                self._send(Dying(time.monotonic(), tuple(each.rank for each in kills)))
                os.kill(os.getpid(), SIGNALS[kill.signal])
                while True:  # another thread may take the signal, and this one must not go on meanwhile
                    time.sleep(1)


@dataclass(frozen=True)
class WholeGrid(Grid):
    """Ranks that each hold a whole replica, in the one group that there is: no mesh, and no groups to make anew."""

    @property
    def replicas(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None
        return group


class GlooSurvivor(Survivor):
    """Ranks of torch.distributed; the launching process says who is left."""

    def __init__(self, place: Place, send: Callable[[object], None], kills: tuple[Kill, ...]) -> None:
        super().__init__(place, send, kills)
        assert place.folder is not None  # torchrun's ranks are refused before
        self._folder = place.folder

    def grid(self, parallel: Parallel, device: torch.device) -> Grid:
        mesh: Any = None
        return WholeGrid(replace(parallel, data_size=self.place.world), self.place.rank, device, mesh)

    def meet(self) -> None:
        dist.barrier()

    def begin_sum(self, flat: Tensor) -> Sum:
        return OrderedSum(flat)

    def share(self, tensor: Tensor, rank: int) -> None:
        dist.broadcast(tensor, rank)

    def told(self, mine: Tensor, shared: Tensor) -> Tensor:
        # One exchange of both: each one more has all ranks wait for each other once more.
        size, world = mine.nbytes, dist.get_world_size()
        own = mine.view(torch.uint8) if self.place.rank else torch.cat([mine.view(torch.uint8), shared])
        sizes = [size + len(shared), *[size] * (world - 1)]
        received = own.new_empty(sum(sizes))
        dist.all_to_all_single(received, own.repeat(world), sizes, [len(own)] * world)
        first, theirs, others = torch.split(received, [size, len(shared), size * (world - 1)])
        shared.copy_(theirs)
        return torch.cat([first, others]).view(mine.dtype).view(world, -1)

    def recover(self, report: Callable[[int], Lost]) -> Plan:
        self._leave()
        self._send(report(self.generation))
        patience = self.place.timeout + 2 * GRACE_SECONDS + 5 * JOINING_SECONDS
        while True:
            plan = await_plan(self._folder, self.generation + 1, patience)
            self.generation = plan.generation
            self._die_in_recovery()
            if self.origin not in plan.ranks:
                raise TrainingError("taken for dead by the launching process")
            self._send(Ready(self.generation))
            if await_leave(self._folder, self.generation, patience):
                if self._joined(plan):
                    return plan
                self._leave()
                self._send(report(self.generation))

    def _joined(self, plan: Plan) -> bool:
        self.ranks = plan.ranks
        self.place = replace(
            self.place,
            rank=plan.ranks.index(self.origin),
            world=len(plan.ranks),
        )
        try:
            seconds = min(JOINING_SECONDS, self.place.timeout)
            make_group(replace(self.place, timeout=seconds), self._store(seconds))
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=self.place.timeout))
            dist.barrier()
        except (RuntimeError, TrainingError):
            return False
        self._send(Joined(self.generation))
        return True

    def _store(self, seconds: float) -> Store:
        """Where the survivors meet, at the first of them: they wait for 10 ms each time that they look into a file."""
        wait = datetime.timedelta(seconds=seconds)
        if self.place.rank:
            port = await_port(self._folder, self.generation, seconds)
            return TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=wait, wait_for_workers=False)
        tell_port(self._folder, self.generation, store.port)
        return store

    def _leave(self) -> None:
        group = [dist.group.WORLD]
        with suppress(RuntimeError, AssertionError, ValueError):  # there may be none, or half of one
            dist.destroy_process_group()
        # The last reference is dropped elsewhere: gloo takes up to 10 ms for each connection to be closed.
        threading.Thread(target=group.clear).start()
        # Torch numbers groups, and ranks that give one different numbers never meet. It counts those that failed, too.
        dist.distributed_c10d._world.group_count = 0
