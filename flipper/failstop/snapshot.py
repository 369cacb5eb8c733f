"""Snapshots in memory: the state before a step, to which a rank can go back."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Snapshot:
    """What a step changes on this rank.

    whole: parameters and the optimizer's state, too; else only buffers and random generators, which a forward pass
    changes.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, whole: bool) -> None:
        self._optimizer, self._whole = optimizer, whole
        self._buffers, self._parameters = list(module.buffers()), list(module.parameters())
        self._on_gpu = any(each.is_cuda for each in self._parameters)
        self._live: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._fresh: list[nn.Parameter] = []
        self._generators: list[Tensor] = []
        self._libraries: tuple[Any, Any] = (None, None)

    def take(self) -> None:
        """Keep the state as it is now."""
        live = list(self._tensors())
        if len(live) != len(self._live) or any(a is not b for a, b in zip(live, self._live, strict=True)):
            self._live, self._kept = live, [torch.empty_like(each) for each in live]
        if self._whole:
            self._fresh = [each for each in self._parameters if each not in self._optimizer.state]
        _copy(self._live, self._kept)
        self._generators = [torch.get_rng_state()]
        if self._on_gpu:
            self._generators.append(torch.cuda.get_rng_state())
        self._libraries = (random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Bring that state back, in the live tensors themselves."""
        _copy(self._kept, self._live)
        if self._whole:
            for parameter in self._fresh:  # the step has made a state for it
                self._optimizer.state.pop(parameter, None)
        torch.set_rng_state(self._generators[0])
        if self._on_gpu:
            torch.cuda.set_rng_state(self._generators[1])
        random.setstate(self._libraries[0])
        np.random.set_state(self._libraries[1])

    def _tensors(self) -> Iterable[Tensor]:
        yield from self._buffers
        if self._whole:
            for parameter in self._parameters:
                yield parameter
                yield from (each for each in self._optimizer.state.get(parameter, {}).values() if _is_tensor(each))


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    if source:
        with torch.no_grad():
            torch._foreach_copy_(target, source)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
