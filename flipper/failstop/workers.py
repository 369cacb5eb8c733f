"""Workers: data-parallel replicas that are computed one after another, or at once, in one process.

By the same rules as real ranks (overlapped.py), so that `exact` workers come to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flipper.errors import UsageError
from flipper.failstop.buckets import bucketed, check_bucketwise
from flipper.failstop.norms import NORMS, WorkerNorms
from flipper.training import canonical, loop, seeds
from flipper.training.recipes.parts import loss_of


@dataclass(frozen=True)
class Death:
    """A worker is lost in a step before bucket `bucket` is averaged; with the number of buckets, after the last."""

    worker: int
    bucket: int


@dataclass(frozen=True)
class Rules:
    """What survivors do, as in FailstopSpec: recovery, world_batch, world_rate and lost_share."""

    recovery: str
    world_batch: str = "fixed"
    world_rate: str = "keep"
    lost_share: str = "drop"


class Workers:
    """All workers of a run that a single rank computes.

    run: at its first step, of the layout `single`. exact: each worker has its own dropout and buffers, as ranks have;
    else the gradients of all are computed at once. timed: nothing is computed at all, but for who lives and how far it
    is.
    """

    def __init__(self, run: loop.Run, count: int, rules: Rules, exact: bool, timed: bool = False) -> None:
        self.run, self.count, self.rules, self.exact, self.timed = run, count, rules, exact, timed
        self.module = run.layout.module
        check_bucketwise(run.layout.optimizer)
        self.buckets = bucketed(self.module.parameters())
        self.sizes = [sum(each.nbytes for each in bucket) for bucket in self.buckets]
        if not exact and not timed and (held := _unknown_norm(self.module)):
            raise UsageError(
                f"--mode batched knows the statistics of each worker for BatchNorm1d, 2d and 3d, not for {held}: use "
                "--mode exact"
            )
        self._known: tuple[Any, dict[int, range]] = (None, {})
        self.begin(None)

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """All workers, at the run's first step or at a checkpoint."""
        run = self.run
        self.alive = list(range(self.count))
        self._norms = WorkerNorms(self.module)
        self._buffers: dict[int, list[Tensor]] = {}
        if checkpoint is None:
            self._generators = {worker: _seeded(run, worker) for worker in self.alive} if self.exact else {}
        else:
            if not self.timed:
                run.layout.load(checkpoint.state)
            run.progress, self._generators = checkpoint.progress, dict(checkpoint.generators)

    def checkpoint(self) -> Checkpoint:
        """What a checkpoint of this step holds."""
        state = {} if self.timed else self.run.layout.gather()
        return Checkpoint(state, self.run.progress, dict(self._generators))

    def step(self, deaths: Sequence[Death] = ()) -> None:
        """One step, in which these workers are lost."""
        run, rules = self.run, self.rules
        numbers = {worker: number for number, worker in enumerate(self.alive)}
        if rules.recovery != "lossy":
            self.lose(deaths)
            deaths = ()
        if self.timed:
            self.lose(deaths)
            run.progress = run.progress.advance(run.batches)
            return
        begun = run.progress.batch * run.recipe.batch_size
        order = seeds.batch_order(run.progress.seed, run.progress.epoch, len(run.data.train_targets))
        batch = order[begun : begun + run.recipe.batch_size]
        places = self._places(len(batch))
        total = sum(map(len, places.values()))
        sums = self._sums(batch, places, deaths, numbers)
        for parameter, gradient in sums.items():
            parameter.grad = gradient
        self._update(total / len(batch) if rules.world_rate == "linear" else 1.0)
        self.lose(deaths)
        if self.exact:
            self._restore(self._buffers[self.alive[0]])  # the first one's are everyone's when a step ends
        else:
            self._norms.take(self.alive[0])
        run.progress = run.progress.advance(run.batches)

    def lose(self, deaths: Sequence[Death]) -> None:
        """Have these workers be no more."""
        lost = {death.worker for death in deaths}
        self.alive = [worker for worker in self.alive if worker not in lost]

    def _places(self, size: int) -> dict[int, range]:
        """Where in a batch of so many samples each worker's lie, as torch.tensor_split cuts it."""
        key = (size, tuple(self.alive))
        if self._known[0] != key:
            fixed = self.rules.world_batch == "fixed"
            cut = _cut(size, len(self.alive) if fixed else self.count)
            places = {worker: cut[place if fixed else worker] for place, worker in enumerate(self.alive)}
            self._known = (key, places)
        return self._known[1]

    def _sums(
        self, batch: Tensor, places: dict[int, range], deaths: Sequence[Death], numbers: dict[int, int]
    ) -> dict[nn.Parameter, Tensor]:
        """The summed gradients: of each bucket over those that live when it is averaged."""
        total = sum(map(len, places.values()))
        until = {death.worker: death.bucket for death in deaths}
        members = [
            [worker for worker in places if until.get(worker, len(self.buckets)) > number] if until else list(places)
            for number in range(len(self.buckets))
        ]
        scales = [
            total / sum(len(places[worker]) for worker in group) if until and self.rules.lost_share == "drop" else 1.0
            for group in members
        ]
        if self.exact:
            return self._one_by_one(batch, places, members, scales, numbers)
        return self._at_once(batch, places, members, scales)

    def _one_by_one(
        self,
        batch: Tensor,
        places: dict[int, range],
        members: list[list[int]],
        scales: list[float],
        numbers: dict[int, int],
    ) -> dict[nn.Parameter, Tensor]:
        """Each worker's gradients, added in rank order; only the sums are kept."""
        total = sum(map(len, places.values()))
        start = self._buffers_now()
        sums: dict[nn.Parameter, Tensor] = {}
        for worker, place in places.items():
            share = batch[place.start : place.stop]
            self._restore(start)
            torch.set_rng_state(self._generators[worker])
            seeds.seed_libraries(self.run.progress.seed, numbers[worker], self.run.progress.step)
            self.backward(share, len(share) / total)
            self._generators[worker] = torch.get_rng_state()
            self._buffers[worker] = self._buffers_now()
            for number, bucket in enumerate(self.buckets):
                if worker not in members[number]:
                    continue
                for parameter in bucket:
                    gradient = parameter.grad
                    assert gradient is not None
                    part = gradient * scales[number] if scales[number] != 1 else gradient
                    if parameter in sums:
                        sums[parameter] += part
                    else:
                        sums[parameter] = part  # the next pass makes gradients of its own
        return sums

    def _at_once(
        self, batch: Tensor, places: dict[int, range], members: list[list[int]], scales: list[float]
    ) -> dict[nn.Parameter, Tensor]:
        """The same sums as the gradient of the mean over all samples of those that live; a pass for each such group."""
        sums: dict[nn.Parameter, Tensor] = {}
        total = sum(map(len, places.values()))
        start = self._buffers_now()
        for group in dict.fromkeys(map(tuple, members)):
            if sum(len(places[worker]) for worker in group) == len(batch):
                samples = batch
            else:
                samples = torch.cat([batch[places[worker].start : places[worker].stop] for worker in group])
            numbers = [number for number, each in enumerate(members) if tuple(each) == group]
            self._restore(start)  # each pass moves them on
            with self._norms.of(group, [len(places[worker]) for worker in group]):
                self.backward(samples, len(samples) / total * scales[numbers[0]])
            for number in numbers:
                sums.update({each: each.grad for each in self.buckets[number] if each.grad is not None})
        return sums

    def backward(self, samples: Tensor, weight: float = 1.0) -> None:
        """Leave the gradients of weight x the mean loss of these samples in the parameters."""
        run = self.run
        self.module.zero_grad()
        output = self.module(run.data.train_features[samples].to(run.layout.grid.device))
        loss = loss_of(run.recipe, output, run.data.train_targets[samples].to(run.layout.grid.device))
        torch.autograd.backward(loss if weight == 1 else loss * weight)

    def _update(self, rate: float) -> None:
        optimizer, schedule = self.run.layout.optimizer, self.run.layout.schedule
        usual = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if rate == 1 else group["lr"] * rate
        optimizer.step()
        for group, lr in zip(optimizer.param_groups, usual, strict=True):
            group["lr"] = lr
        if schedule is not None:
            schedule.step()

    def _buffers_now(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.module.buffers()]

    def _restore(self, buffers: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(value)


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes back to: canonical state, progress, and each worker's random generator."""

    state: canonical.State
    progress: Any
    generators: dict[int, Tensor]


def _cut(size: int, parts: int) -> list[range]:
    """As torch.tensor_split cuts: the first parts have one more where it doesn't come out even."""
    least, more = divmod(size, parts)
    ends = [number * least + min(number, more) for number in range(parts + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def _seeded(run: loop.Run, worker: int) -> Tensor:
    seeds.seed_rank(run.progress.seed, worker, run.progress.step)
    return torch.get_rng_state()


def _unknown_norm(module: nn.Module) -> str:
    """The first module whose training statistics are those of a worker's batch, and that norms.py doesn't know."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    found = (each for each in module.modules() if isinstance(each, kind) and type(each) not in NORMS)
    return next((type(each).__name__ for each in found), "")
