"""The state of a learning rate's schedule as tensors, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from flipper.errors import MismatchError


def to_state(schedule: LRScheduler) -> dict[str, Tensor]:
    """All numbers of a schedule under `scheduler.`: int64 and float64 scalars, lists of numbers as vectors."""
    found: dict[str, Tensor] = {}
    _flatten("scheduler", schedule.state_dict(), found)
    return found


def restore(schedule: LRScheduler, state: dict[str, Tensor]) -> None:
    """Set a schedule, and the learning rates that it has set, as a state says; MismatchError when it is of another."""
    schedule.load_state_dict(_refilled("scheduler", schedule.state_dict(), state))
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def _flatten(name: str, value: Any, found: dict[str, Tensor]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{name}.{key}", inner, found)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for number, inner in enumerate(value):
            _flatten(f"{name}.{number}", inner, found)
    elif _numeric(value):
        numbers = value if isinstance(value, list) else [value]
        kind = torch.float64 if any(isinstance(number, float) for number in numbers) else torch.int64
        found[name] = torch.tensor(value, dtype=kind)


def _refilled(name: str, value: Any, state: dict[str, Tensor]) -> Any:
    """A value of the shape of `value` with the numbers of the state."""
    if isinstance(value, dict):
        return {key: _refilled(f"{name}.{key}", inner, state) for key, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return [_refilled(f"{name}.{number}", inner, state) for number, inner in enumerate(value)]
    if not _numeric(value):
        return value
    tensor = state.get(name)
    if tensor is None or list(tensor.shape) != ([len(value)] if isinstance(value, list) else []):
        raise MismatchError(f"can't resume: {name} is missing, or of another schedule than the recipe's")
    return type(value)(tensor.tolist())


def _numeric(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(isinstance(number, int | float) for number in numbers)
