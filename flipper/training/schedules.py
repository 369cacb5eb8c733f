"""A learning rate's schedule, and its state as tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flipper.errors import MismatchError
from flipper.training.recipes.parts import schedule_of
from flipper.training.recipes.recipe import Recipe

Group = dict[str, Any]


class Schedule:
    """A recipe's schedule with all that it moves in the optimizer: learning rates, and momenta where it cycles them.

    Its state has every number of torch's own under `scheduler.`, and what it moves beside learning rates under
    `scheduler.groups.<group>.<name>`. Whether it moves more is judged by what making it did to the optimizer.
    """

    def __init__(self, schedule: LRScheduler, before: list[Group]) -> None:
        """before: the optimizer's groups, as `settings` gives them, before the schedule was made."""
        self._torch = schedule
        self._moved = [_moved(old, new) for old, new in zip(before, self._groups, strict=True)]

    @classmethod
    def of(cls, recipe: Recipe, optimizer: Optimizer) -> Schedule | None:
        """The recipe's schedule of this optimizer; None without one."""
        before = settings(optimizer)
        schedule = schedule_of(recipe, optimizer)
        return None if schedule is None else cls(schedule, before)

    def step(self) -> None:
        """Go on to the next step's learning rate."""
        self._torch.step()

    def to_state(self) -> dict[str, Tensor]:
        """All numbers: int64 and float64 scalars, lists of numbers as vectors."""
        found: dict[str, Tensor] = {}
        _flatten("scheduler", self._torch.state_dict(), found)
        _flatten("scheduler.groups", self._settings(), found)
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set it, and what it has set in the optimizer, as a state says; MismatchError when it is of another."""
        held = _refilled("scheduler", self._torch.state_dict(), state)
        moved = _refilled("scheduler.groups", self._settings(), state)
        self._torch.load_state_dict(held)
        for group, rate, more in zip(self._groups, self._torch.get_last_lr(), moved.values(), strict=True):
            if isinstance(group["lr"], Tensor):  # an optimizer that captures it keeps this very tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            group.update(more)

    def snapshot(self) -> dict[str, Any]:
        """A copy of its own state, for `put_back`; the optimizer's settings are not in it."""
        return copy.deepcopy(self._torch.state_dict())

    def put_back(self, snapshot: dict[str, Any]) -> None:
        self._torch.load_state_dict(copy.deepcopy(snapshot))

    @property
    def _groups(self) -> list[Group]:
        return self._torch.optimizer.param_groups

    def _settings(self) -> dict[int, Group]:
        """What it has moved beside learning rates, by group."""
        return {
            number: {name: group[name] for name in moved}
            for number, (group, moved) in enumerate(zip(self._groups, self._moved, strict=True))
        }


def settings(optimizer: Optimizer) -> list[Group]:
    """A copy of the optimizer's settings, group by group."""
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def _moved(old: Group, new: Group) -> list[str]:
    """The settings that a schedule was seen to move, or says that it will."""
    seen = {name for name, value in old.items() if name != "lr" and new[name] != value}
    return sorted(seen | ({"momentum", "betas"} & old.keys() if "max_momentum" in new else set()))


def _flatten(name: str, value: Any, found: dict[str, Tensor]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{name}.{key}", inner, found)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for number, inner in enumerate(value):
            _flatten(f"{name}.{number}", inner, found)
    elif _numeric(value):
        numbers = _plain(value)
        kind = torch.float64 if any(isinstance(number, float) for number in numbers) else torch.int64
        found[name] = torch.tensor(numbers if isinstance(value, list | tuple) else numbers[0], dtype=kind)


def _refilled(name: str, value: Any, state: Mapping[str, Tensor]) -> Any:
    """A value of the shape of `value` with the numbers of the state."""
    if isinstance(value, dict):
        return {key: _refilled(f"{name}.{key}", inner, state) for key, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return [_refilled(f"{name}.{number}", inner, state) for number, inner in enumerate(value)]
    if not _numeric(value):
        return value
    tensor = state.get(name)
    many = isinstance(value, list | tuple)
    if tensor is None or list(tensor.shape) != ([len(value)] if many else []):
        raise MismatchError(f"can't resume: {name} is missing, or of another schedule than the recipe's")
    if many:
        return type(value)(_alike(old, new) for old, new in zip(value, tensor.tolist(), strict=True))
    return _alike(value, tensor.item())


def _alike(old: Any, new: int | float) -> Any:
    """The new number as the old one was: a learning rate may be a tensor."""
    if isinstance(old, Tensor):
        return torch.full_like(old, new)
    return bool(new) if isinstance(old, bool) else new


def _plain(value: Any) -> list[int | float]:
    return [each.item() if isinstance(each, Tensor) else each for each in _each(value)]


def _numeric(value: Any) -> bool:
    numbers = _each(value)
    return bool(numbers) and all(
        isinstance(number, int | float) or (isinstance(number, Tensor) and not number.dim()) for number in numbers
    )


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
