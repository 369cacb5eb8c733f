"""A survivor: what a rank does when contact is lost, until it is in the group of those that are left."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch.distributed as dist

from flipper.errors import TrainingError
from flipper.failstop.kills import SIGNALS, Kill
from flipper.failstop.messages import Dying, Joined, Lost, Plan, Ready, await_leave, await_plan
from flipper.training.launch import GRACE_SECONDS
from flipper.training.ranks import Place

JOINING_SECONDS: Final = 10.0
"""To make the survivors' group: all are there already."""


class Survivor:
    """This rank, by its number at the start, and the process group that it is in.

    send: to the launching process.
    """

    def __init__(self, place: Place, send: Callable[[object], None], kills: tuple[Kill, ...]) -> None:
        self.origin = place.rank
        self.place = place
        self.ranks = tuple(range(place.world))
        self.generation = 0
        self.kills = kills
        self._send = send
        self._folder = Path(place.rendezvous.removeprefix("file://")).parent

    def meet_and_die(self, step: int, bucket: int | None = None) -> None:
        """Where a kill is due: meet, so that all have come exactly as far; who is to die ends, the others notice."""
        due = [kill for kill in self.kills if (kill.step, kill.bucket) == (step, bucket) and kill.rank in self.ranks]
        if due:
            dist.barrier()
            for kill in due:
                self._die_by(kill)
            dist.barrier()

    def recover(self, report: Callable[[int], Lost]) -> Plan:
        """Tell of the loss, and join the others that are left; what this rank does then is plan.actions[rank].

        report: what to tell, given the generation that broke. The caller has let go of all that hangs on the group.
        """
        self._leave()
        self._send(report(self.generation))
        patience = self.place.timeout + 2 * GRACE_SECONDS + JOINING_SECONDS
        while True:
            plan = await_plan(self._folder, self.generation + 1, patience)
            self.generation = plan.generation
            for kill in self.kills:
                if kill.recovery == self.generation:
                    self._die_by(kill)
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
            rendezvous=f"file://{self._folder}/rendezvous-{plan.generation}",
        )
        try:
            self._make_group(min(JOINING_SECONDS, self.place.timeout))
        except RuntimeError:
            return False
        self._send(Joined(self.generation, time.monotonic()))
        return True

    def _make_group(self, seconds: float) -> None:
        dist.init_process_group(
            dist_backend(self.place),
            init_method=self.place.rendezvous,
            rank=self.place.rank,
            world_size=self.place.world,
            timeout=datetime.timedelta(seconds=seconds),
        )
        dist.barrier()
        group = dist.group.WORLD
        assert group is not None
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=self.place.timeout), group)

    def _leave(self) -> None:
        with suppress(RuntimeError, AssertionError, ValueError):  # there may be none, or half of one
            dist.destroy_process_group()

    def _die_by(self, kill: Kill) -> None:
        if kill.rank == self.origin:
            self._send(Dying(time.monotonic()))
            os.kill(os.getpid(), SIGNALS[kill.signal])


def dist_backend(place: Place) -> str:
    """gloo, and nccl beside it where ranks compute on GPUs; as ranks.py makes the first group."""
    import torch

    return "cpu:gloo,cuda:nccl" if place.device != "cpu" and torch.cuda.is_available() else "gloo"
