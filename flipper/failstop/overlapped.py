"""Overlapped: data-parallel steps by the bucketed reducer, and how survivors go on where a lost rank broke one off."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flipper.errors import UsageError
from flipper.failstop.buckets import LostContact, Reducer, check_bucketwise, contact
from flipper.failstop.messages import Lost, Plan
from flipper.failstop.snapshot import Snapshot
from flipper.failstop.spec import FailstopSpec
from flipper.failstop.survivor import Survivor
from flipper.training.canonical import State
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.layout import Layout, StepResult
from flipper.training.parallel.shards import Shard
from flipper.training.parallel.whole import Whole
from flipper.training.recipes.recipe import Recipe


class Overlapped(Layout):
    """One replica, whose group may shrink.

    completed: steps of the run that are finished; set it before the first one. phase: see messages.Lost.
    on_first: called when this rank has become the first of those that are left.
    """

    def __init__(
        self, grid: Grid, recipe: Recipe, engine: Whole, ties: Mapping[str, str], survivor: Survivor, job: FailstopSpec
    ) -> None:
        super().__init__(grid, recipe, engine, ties)
        check_bucketwise(self.optimizer)
        self.survivor = survivor
        self.completed = 0
        self.phase = "meet"
        self.result: StepResult | None = None
        self.on_first: Callable[[], None] = lambda: None
        self._job = job
        self._reducer = Reducer(self.module, self.optimizer, survivor, self._meet_before)
        self._snapshot = Snapshot(self.module, self.optimizer, whole=job.recovery == "rollback")
        self._sizes: dict[int, int] = {}
        # The widest first, so that each lies aligned among the bytes of all; looked up once, as DDP does.
        self._buffers = sorted(self.module.buffers(), key=lambda each: -each.itemsize)
        self._alike = False  # whether all have rank 0's buffers
        self._loss = torch.zeros(())
        self._check_kills()

    def _check_kills(self) -> None:
        count = len(self._reducer.buckets)
        for kill in self.survivor.kills:
            if kill.bucket is not None and kill.bucket >= count:
                raise UsageError(f"--kill {kill}: the model has {count} buckets, 0 to {count - 1}")

    def step(
        self,
        features: Tensor,
        targets: Tensor,
        batch: Tensor,
        on_gradients: Callable[[dict[str, Shard]], None] | None = None,
    ) -> StepResult:
        """As Layout.step, whoever dies meanwhile."""
        assert on_gradients is None
        self.phase = "meet"
        self._snapshot.take()
        result: StepResult | None = None
        whole = partial(self._whole_step, features, targets, batch)
        attempt: Callable[[], StepResult] = whole
        while result is None:
            try:
                result = attempt()
                break
            except LostContact as error:
                said = str(error)
            plan = self.recover(said)
            action = plan.actions[self.grid.rank]
            if action == "redo":
                self._snapshot.restore()
                self.phase, attempt = "meet", whole
            elif action == "finish":
                attempt = self._finishing(plan)
            elif action == "done":
                assert plan.result is not None
                result = StepResult(*plan.result)
        if self.schedule is not None:
            # Torch warns when its own optimizer hasn't stepped; those of the buckets have.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            self.schedule.step()
        self.completed += 1
        self.result, self.phase = result, "look"
        return result

    def recover(self, said: str) -> Plan:
        """After a loss: go into the survivors' group. said: what was seen of it."""
        device, parallel, was = self.grid.device, self.grid.parallel, self.grid.rank
        del self.grid
        self._alike = False
        plan = self.survivor.recover(lambda generation: self._report(generation, said))
        self.regroup(self.survivor.grid(parallel, device))
        if was and not self.grid.rank:
            self.on_first()
        return plan

    def whole(self, shards: Mapping[str, Shard], replica: int = 0) -> State:
        """As Layout.whole; a replica has all of it, and nobody needs to be asked."""
        if self.grid.rank != replica:
            return {}
        return {name: shard.tensor.detach().cpu().clone() for name, shard in shards.items()}

    def _report(self, generation: int, said: str) -> Lost:
        result = None if self.result is None else (self.result.loss, self.result.grad_norm, self.result.lr)
        done = frozenset(self._reducer.done) if self.phase in ("reduce", "measure") else frozenset()
        return Lost(generation, self.completed, self.phase, done, result, said, time.monotonic())

    def _whole_step(self, features: Tensor, targets: Tensor, batch: Tensor) -> StepResult:
        reducer = self._reducer
        with contact():
            self.survivor.meet_and_die(self.completed + 1)
        self.optimizer.zero_grad()
        if not self._alike or self.completed == self._job.train.at:  # a strike may have been of one rank
            self._share_buffers()
        mine, self._sizes = self._share_of(batch)
        total = sum(self._sizes.values())
        reducer.rate = total / len(batch) if self._job.world_rate == "linear" else 1.0
        reducer.begin()
        try:
            loss = self._engine.backward(
                features[mine].to(self.grid.device), targets[mine].to(self.grid.device), len(mine) / total
            )
        except Exception:
            with suppress(LostContact):
                reducer.finish()
            raise
        self.phase = "reduce"  # all gradients are there: whoever is lost from now on, they can be averaged
        if not reducer.finish():
            raise UsageError("some parameters got no gradient, and ddp:N refuses that: leave them out of the model")
        assert loss is not None
        self._loss = loss
        return self._measure(1.0)

    def _finishing(self, plan: Plan) -> Callable[[], StepResult]:
        """The rest of a step whose gradients each survivor has computed already."""

        def finish() -> StepResult:
            total, left = sum(self._sizes.values()), sum(self._sizes[origin] for origin in plan.ranks)
            scale = total / left if self._job.lost_share == "drop" else 1.0
            self.phase = "reduce"
            self._reducer.rest(plan.donors, scale)
            return self._measure(scale)

        return finish

    def _measure(self, scale: float) -> StepResult:
        self.phase = "measure"
        with contact():
            result = self._measured(self._loss * scale if scale != 1 else self._loss)
        rate = self._reducer.rate
        return result if rate == 1 else replace(result, lr=result.lr * rate)

    def _share_of(self, batch: Tensor) -> tuple[Tensor, dict[int, int]]:
        """This rank's samples, and how many each has, by its number at the start."""
        origins = self.survivor.ranks
        if self._job.world_batch == "fixed":
            shares = batch.tensor_split(self.grid.world)
        else:
            all_shares = batch.tensor_split(self._job.train.parallel.ranks)
            shares = tuple(all_shares[origin] for origin in origins)
        return shares[self.grid.rank], {origin: len(each) for origin, each in zip(origins, shares, strict=True)}

    def _share_buffers(self) -> None:
        """Give every replica the first one's, as DistributedDataParallel does before each forward pass."""
        held = self._held_buffers()
        with contact():
            self.survivor.share(held, 0)
        self._take_buffers(held)

    def _stacked(self, mine: Tensor) -> Tensor:
        # Buffers come along, so that the next step begins without waiting for them.
        held = self._held_buffers()
        everyone = self.survivor.told(mine, held)
        self._take_buffers(held)
        self._alike = True
        return everyone

    def _held_buffers(self) -> Tensor:
        """The bytes of all buffers."""
        parts = [each.reshape(-1).view(torch.uint8) for each in self._buffers]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self.grid.device)

    def _take_buffers(self, held: Tensor) -> None:
        if self.grid.rank:
            parts = torch.split(held, [each.nbytes for each in self._buffers])
            for part, each in zip(parts, self._buffers, strict=True):
                each.copy_(part.view(each.dtype).view_as(each))

    def _meet_before(self, bucket: int) -> None:
        step = self.completed + 1
        if self.survivor.due(step, bucket):
            self._reducer.settle()  # so that all have come exactly as far
            with contact():
                self.survivor.meet_and_die(step, bucket)
