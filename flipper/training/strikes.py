"""Strikes on live state: faults in the tensors of a running job's ranks, as a plan names them."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flipper.checkpoints import writers
from flipper.errors import FlipperError, MismatchError, UsageError
from flipper.faults.draw import draw
from flipper.faults.plan import FaultPlan, Target
from flipper.injection.memory import strike
from flipper.training.canonical import State, dtype_name
from flipper.training.faults_file import LiveFaults
from flipper.training.parallel.fsdp import unsharded
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.layout import Layout
from flipper.training.parallel.shards import Shard, shard_of
from flipper.training.reach import Reach
from flipper.training.saving import contents

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Struck:
    """What a strike came to. elements: struck anywhere, counted once a copy; ranks: that were struck."""

    faults: int
    elements: int
    ranks: tuple[int, ...]


def strike_state(layout: Layout, faults: LiveFaults, reach: Reach) -> Struck:
    """Strike parameters, buffers, optimizer state and schedule between two steps; a collective.

    Raises UsageError and MismatchError on every rank alike, before anything was struck.
    """
    live = layout.live()
    held = None
    if layout.schedule is not None:
        held = layout.schedule.to_state()
        live |= {name: replace(shard_of(tensor, layout.grid), copied_over=_ALL) for name, tensor in held.items()}
    plan = _plan(faults, layout.gather, layout.grid)
    struck = _strike(live, plan, reach, faults.seed, layout.grid)
    if layout.schedule is not None and held is not None:
        layout.schedule.restore(held)
    return struck


def strike_gradients(layout: Layout, gradients: Mapping[str, Shard], faults: LiveFaults, reach: Reach) -> Struck:
    """Strike the summed gradients, named `gradient.<parameter>`, before the optimizer uses them; a collective."""
    plan = _plan(faults, lambda: layout.whole(gradients), layout.grid)
    return _strike(dict(gradients), plan, reach, faults.seed, layout.grid)


class LocalGradientStrike:
    """A strike on ranks' own gradients before they are summed, in the one backward pass after it was armed.

    The faults are drawn before the gradients are there, so guards and effects that look at values are refused.
    Under FSDP each rank has gradients of whole parameters before the sum, and so a copy of each element.
    """

    def __init__(self, layout: Layout, faults: LiveFaults, reach: Reach) -> None:
        self._grid = layout.grid
        parameters = {name: each for name, each in unsharded(layout.module).items() if each.requires_grad}
        zeros = {
            f"gradient.{name}": replace(shard, tensor=torch.zeros_like(shard.tensor))
            for name, parameter in parameters.items()
            for shard in [shard_of(parameter, layout.grid)]
        }
        if (model := faults.model) is not None and (
            model.finite or model.direction or model.max_abs is not None or model.effect.startswith("scale")
        ):
            raise UsageError("local gradients are struck as they appear: no finite, max_abs, direction or scale there")
        plan = _plan(faults, lambda: layout.whole(zeros), layout.grid)
        chosen = _chosen(zeros, plan, reach, faults.seed, layout.grid)
        self._count = _count(plan, chosen, layout.grid)
        self._pending = dict(chosen)
        self._handles = []
        for name in chosen:
            parameter = parameters[name.removeprefix("gradient.")]
            self._handles.append(parameter.register_hook(self._hook(name)))  # type: ignore[no-untyped-call]

    @property
    def struck(self) -> Struck:
        """What it came to, after the pass; MismatchError when a gradient never came."""
        if self._pending:
            raise MismatchError(f"{min(self._pending)} did not appear in this step: nothing could be struck there")
        return self._count

    def disarm(self) -> None:
        """After the pass."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            if name not in self._pending:  # micro-batches come one by one: the first is struck
                return None
            altered = gradient.detach().clone()
            strike({name: shard_of(altered, self._grid).tensor}, self._pending.pop(name))
            return altered

        return hook


_ALL = frozenset(("data", "model"))


def _plan(faults: LiveFaults, gather: Callable[[], State], grid: Grid) -> FaultPlan:
    """The plan on every rank: the one that is known, or what rank 0 draws as from a checkpoint of what is gathered.

    So are the errors of drawing.
    """
    if faults.plan is not None:
        return faults.plan
    state = gather()  # a collective
    outcome: list[FaultPlan | FlipperError | None] = [None]
    if grid.rank == 0:
        try:
            outcome = [_drawn(faults, state)]
        except FlipperError as error:
            outcome = [error]
    if grid.world > 1:
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], FlipperError):
        raise outcome[0]
    return cast(FaultPlan, outcome[0])


def _drawn(faults: LiveFaults, state: State) -> FaultPlan:
    assert faults.model is not None
    with tempfile.TemporaryDirectory(prefix="flipper-strike-") as folder:
        path = Path(folder, "state.safetensors")
        writers.write(contents(state), path, "safetensors")
        return draw(path, faults.model, faults.seed)


def _strike(live: Mapping[str, Shard], plan: FaultPlan, reach: Reach, seed: int, grid: Grid) -> Struck:
    chosen = _chosen(live, plan, reach, seed, grid)
    with torch.no_grad():
        for name, part in chosen.items():
            strike({name: live[name].tensor}, part)
    return _count(plan, chosen, grid)


def _count(plan: FaultPlan, chosen: Mapping[str, FaultPlan], grid: Grid) -> Struck:
    mine = sum(len(part) for part in chosen.values())
    everyone = grid.everyone(mine)
    return Struck(len(plan), sum(everyone), tuple(rank for rank, count in enumerate(everyone) if count))


def _chosen(live: Mapping[str, Shard], plan: FaultPlan, reach: Reach, seed: int, grid: Grid) -> dict[str, FaultPlan]:
    """The faults that this rank makes, by tensor, in terms of its own shard."""
    problem: FlipperError | None = None
    parts: list[tuple[str, Ints, Ints]] = []
    try:
        for target, span in plan.by_target():
            here, local = _located(live, target, plan.flat[span])
            parts.append((target.name, here + span.start, local))
    except FlipperError as error:
        problem = error
    held = np.concatenate([np.zeros(0, np.int64), *(rows for _, rows, _ in parts)])
    everyone = grid.everyone((problem, held))
    for other, _ in everyone:
        if other is not None:
            raise other
    holders = [where for _, where in everyone]
    mine = _allowed(plan, holders, reach, seed, grid)
    chosen = {}
    for name, rows, local in parts:
        keep = np.isin(rows, mine)
        if keep.any():
            chosen[name] = _part(plan, name, live[name].tensor, rows[keep], local[keep])
    return chosen


def _located(live: Mapping[str, Shard], target: Target, flat: Ints) -> tuple[Ints, Ints]:
    """Which of the elements lie in this rank's shard of a tensor, by row, and where in the shard."""
    none = np.zeros(0, np.int64)
    shard = live.get(target.name)
    if shard is None:
        return none, none
    shape, dtype = shard.shape, dtype_name(shard.tensor)
    if (target.dtype, target.shape) not in ((None, None), (dtype, shape)):
        seen, wanted = f"{dtype}{list(shape)}", f"{target.dtype}{list(target.shape or ())}"
        raise MismatchError(f"{target.name} is {seen} in this run and {wanted} among the faults")
    extra = (2,) if shard.tensor.is_complex() else ()
    if not shape + extra:
        return np.arange(len(flat)), flat
    if len(flat) and not 0 <= flat.min() <= flat.max() < math.prod(shape + extra):
        raise MismatchError(f"{target.name} has {math.prod(shape + extra)} elements; the faults name others")
    starts, lengths = (*shard.starts, *(0 for _ in extra)), (*shard.tensor.shape, *extra)
    inside = np.ones(len(flat), bool)
    steps = []
    for index, start, length in zip(np.unravel_index(flat, shape + extra), starts, lengths, strict=True):
        inside &= (index >= start) & (index < start + length)
        steps.append(index - start)
    here = np.flatnonzero(inside)
    if not len(here):
        return none, none
    return here, np.ravel_multi_index(tuple(step[here] for step in steps), lengths).astype(np.int64)


def _allowed(plan: FaultPlan, holders: list[Ints], reach: Reach, seed: int, grid: Grid) -> Ints:
    """The rows of the plan that this rank makes; raises UsageError for rows that nobody, or not that rank, holds."""
    copies = np.zeros(len(plan), np.int64)
    for held in holders:
        copies[held] += 1
    if len(lost := np.flatnonzero(copies == 0)):
        name = plan.targets[int(plan.target[lost[0]])].name
        raise MismatchError(f"{name} is not live in this run at this step: parameters, buffers and optimizer state are")
    if reach.kind == "all":
        return holders[grid.rank]
    if reach.kind == "rank":
        missing = np.setdiff1d(np.arange(len(plan)), holders[reach.rank])
        if len(missing):
            row = int(missing[0])
            owners = ", ".join(str(rank) for rank, held in enumerate(holders) if row in held)
            name = plan.targets[int(plan.target[row])].name
            raise UsageError(
                f"--reach rank:{reach.rank} holds no element {int(plan.flat[row])} of {name}; its owners: {owners}"
            )
        return holders[reach.rank] if grid.rank == reach.rank else np.zeros(0, np.int64)
    # One copy of each: the same turn for all elements, so that they strike one replica.
    turn = int.from_bytes(hashlib.sha256(f"reach\0{seed}".encode()).digest()[:7], "little") % copies
    seen = np.zeros(len(plan), np.int64)
    for held in holders[: grid.rank]:
        seen[held] += 1
    mine: Ints = holders[grid.rank]
    chosen: Ints = mine[seen[mine] == turn[mine]]
    return chosen


def _part(plan: FaultPlan, name: str, tensor: Tensor, rows: Ints, local: Ints) -> FaultPlan:
    """Some rows of a plan as a plan for a shard."""
    target = Target(name, dtype_name(tensor), tuple(tensor.shape))
    ordered = np.argsort(local, kind="stable")
    rows = rows[ordered]
    zeros = np.zeros(len(rows), np.int64)
    return FaultPlan((target,), zeros, local[ordered], plan.op[rows], plan.mask[rows], plan.value[rows])
