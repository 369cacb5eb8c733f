"""Layout: one rank's part of a run: its shards of the state, its steps, and the canonical state put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flipper.errors import MismatchError
from flipper.training.canonical import State, octets
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.shards import Shard, local, shard_of
from flipper.training.recipes.parts import optimizer_of
from flipper.training.recipes.recipe import Recipe
from flipper.training.schedules import Schedule
from flipper.training.ties import names_of, parameters_of


class Engine(Protocol):
    """How a rank computes gradients. module: this rank's part of the model, under the model's own names."""

    module: nn.Module

    def backward(self, features: Tensor, targets: Tensor, weight: float) -> Tensor | None:
        """The gradients of weight x the mean loss, summed over replicas; returns weight x loss where it is known."""


@dataclass(frozen=True)
class StepResult:
    """What one step measured, the same on every rank: the batch's mean loss, the gradient's L2 norm, and
    the learning rate that it was taken with."""

    loss: float
    grad_norm: float
    lr: float


class Layout:
    """One rank's part of a model under one strategy. `step`, `gather` are collectives."""

    def __init__(self, grid: Grid, recipe: Recipe, engine: Engine, ties: Mapping[str, str]) -> None:
        """ties: of the whole model; see ties.ties_of."""
        self._ties = ties
        self.module = engine.module
        self.optimizer = optimizer_of(recipe, self.module.parameters())
        self.schedule = Schedule.of(recipe, self.optimizer)
        self._engine = engine
        self._saved = set(self.module.state_dict())
        self.regroup(grid)

    @property
    def ties(self) -> dict[str, str]:
        """Further canonical name -> the name that its tensor is saved under."""
        return {f"model.{alias}": f"model.{name}" for alias, name in self._ties.items()}

    def regroup(self, grid: Grid) -> None:
        """Be in this grid from now on."""
        self.grid = grid
        # The gradients that this rank counts in the norm; where they lie doesn't change from step to step.
        self._counted = [each for each in self.module.parameters() if shard_of(each, grid).speaks_for(grid)]

    def load(self, state: Mapping[str, Tensor], own: bool = False) -> None:
        """Take this rank's part of a canonical state that was checked; live tensors are kept and written to.

        own: the state is that part already, as `live` gave it on this very rank.
        """
        with torch.no_grad():
            for name, shard in self._model():
                shard.tensor.copy_(state[name] if own else state[name][shard.box])
        self._load_optimizer(state, own)
        if self.schedule is not None and any(name.startswith("scheduler.") for name in state):
            self.schedule.restore(state)

    def step(
        self,
        features: Tensor,
        targets: Tensor,
        batch: Tensor,
        on_gradients: Callable[[dict[str, Shard]], None] | None = None,
    ) -> StepResult:
        """Train on one batch: the samples that it names, of which each rank takes its share.

        batch: indexes into features and targets, the same on every rank.
        on_gradients: sees the summed gradients as shards named `gradient.<parameter>`, and may alter them.
        """
        grid = self.grid
        mine = batch.tensor_split(grid.parallel.data_size)[grid.replica]
        self.optimizer.zero_grad()
        loss = self._engine.backward(
            features[mine].to(grid.device), targets[mine].to(grid.device), len(mine) / len(batch)
        )
        if on_gradients is not None:
            on_gradients(self.gradients())
        result = self._measured(loss)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return result

    def live(self) -> dict[str, Shard]:
        """All of model and optimizer that this rank holds, by canonical name."""
        return {**dict(self._model()), **dict(self._optimizer())}

    def gradients(self) -> dict[str, Shard]:
        """The gradients that this rank holds."""
        return {
            f"gradient.{name}": shard_of(parameter.grad, self.grid)
            for name, parameter in parameters_of(self.module).items()
            if parameter.grad is not None
        }

    def gather(self, replica: int = 0) -> State:
        """The canonical model, optimizer and schedule as one replica holds them, on its first rank; empty elsewhere.

        The tensors are copies on the CPU; one that the model has under several names is one here, too.
        """
        state = self.whole(self.live(), replica)
        if state:
            state.update({f"model.{name}": state[f"model.{first}"] for name, first in self._ties.items()})
        if state and self.schedule is not None:
            state.update(self.schedule.to_state())
        return {name: state[name] for name in sorted(state, key=lambda name: name.partition(".")[0])}

    def whole(self, shards: Mapping[str, Shard], replica: int = 0) -> State:
        """Shards of any tensors put together as one replica holds them, on its first rank; a collective."""
        return put_together(self.grid, self.spoken_for(shards, replica), replica)

    def spoken_for(self, shards: Mapping[str, Shard], replica: int = 0) -> dict[str, Shard]:
        """Those of the shards that this rank speaks for in a replica; all ranks' together are the replica's tensors."""
        return {name: shard for name, shard in shards.items() if shard.speaks_for(self.grid, replica)}

    def resident(self) -> State:
        """What of model, optimizer and schedule on this very rank the next step depends on.

        Buffers count on the first replica only: DDP overwrites the others' before each pass, elsewhere they are
        statistics that no gradient depends on.
        """
        state = {name: shard.tensor for name, shard in self.live().items()}
        if self.grid.replica:
            for name, tensor in names_of(self.module).items():
                if not isinstance(tensor, nn.Parameter):
                    state.pop(f"model.{name}", None)
        return state | (self.schedule.to_state() if self.schedule is not None else {})

    def _model(self) -> Iterator[tuple[str, Shard]]:
        for name, tensor in names_of(self.module).items():
            if name in self._saved:
                yield f"model.{name}", shard_of(tensor, self.grid)

    def _optimizer(self) -> Iterator[tuple[str, Shard]]:
        for name, parameter in parameters_of(self.module).items():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if value is not None:
                    yield f"optimizer.{name}.{key}", shard_of(torch.as_tensor(value), self.grid)

    def _load_optimizer(self, state: Mapping[str, Tensor], own: bool) -> None:
        self.optimizer.state.clear()
        parameters = parameters_of(self.module)
        for name, value in state.items():
            owner, _, key = name.removeprefix("optimizer.").rpartition(".")
            if not name.startswith("optimizer.") or owner not in parameters:
                continue
            parameter = parameters[owner]
            shape = local(parameter).shape if own else parameter.shape
            if value.shape == shape and key != "step":
                held = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                shard = shard_of(held, self.grid)
                shard.tensor.copy_(value if own else value[shard.box])
            elif value.dim() and isinstance(parameter, DTensor):
                raise MismatchError(f"can't resume: {self.grid.parallel} parts {owner}, and {name} fits no shard of it")
            else:  # a scalar (Adam's step) stays on the CPU, where optimizers keep it
                held = value.clone().to(parameter.device if value.dim() else "cpu")
            self.optimizer.state[parameter][key] = held

    def _measured(self, loss: Tensor | None) -> StepResult:
        """Loss and gradient norm, summed over the ranks in their order."""
        grid = self.grid
        rate = float(self.optimizer.param_groups[0]["lr"])
        own = [local(parameter.grad) for parameter in self._counted if parameter.grad is not None]
        mine = torch.zeros(2, dtype=torch.float64, device=grid.device)
        for norms in _by_dtype(torch._foreach_norm(own) if own else ()):
            mine[0] += torch.stack(norms).double().square().sum()  # in double: what was struck may be huge
        if loss is not None and (grid.parallel.pipelined or grid.part == 0):
            mine[1] = loss
        if grid.world == 1:
            return StepResult(mine[1].item(), mine[0].sqrt().item(), rate)
        squares, losses = self._stacked(mine).unbind(1)
        return StepResult(sum(losses.tolist()), sum(squares.tolist()) ** 0.5, rate)

    def _stacked(self, mine: Tensor) -> Tensor:
        """Each rank's vector, by rank, at the end of a step; a collective."""
        return self.grid.stacked(mine)


def put_together(grid: Grid, mine: Mapping[str, Shard], replica: int = 0) -> State:
    """Whole tensors from the shards that ranks speak for, on the first rank of the replica, else nothing; a collective.

    The tensors are copies on the CPU.
    """
    root = replica * grid.parallel.model_size
    listed = [(name, shard.tensor.dtype, shard.shape, shard.box) for name, shard in mine.items()]
    everyone: list[Any] = [listed] * grid.world
    if grid.world > 1:
        dist.gather_object(listed, everyone if grid.rank == root else None, dst=root)
    if grid.rank != root:
        for shard in mine.values():
            if shard.tensor.numel():
                dist.send(octets(shard.tensor), root)
        return {}
    state: State = {}
    for rank, entries in enumerate(everyone):
        for name, dtype, shape, box in entries:
            here = mine[name].tensor if rank == root else _received(rank, dtype, box)
            if name not in state:
                state[name] = torch.empty(shape, dtype=dtype)
            state[name][box] = here
    return state


def _by_dtype(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """The tensors in groups that can be stacked; one, but in models of mixed precision."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups.values()


def _received(rank: int, dtype: torch.dtype, box: tuple[slice, ...]) -> Tensor:
    """A tensor of the box's shape, sent by another rank."""
    part = torch.empty([each.stop - each.start for each in box], dtype=dtype)
    if part.numel():
        dist.recv(part.reshape(-1).view(torch.uint8), rank)
    return part
