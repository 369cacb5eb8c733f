"""The bucketed reducer: gradients are averaged, and weights updated, while the backward pass goes on.

A thread of its own averages bucket k-1 in rank order and applies it while autograd computes bucket k. So at any moment
some layers are updated and some are not, as in the source: Nicolae, Hobson, Yildiz, Peterka, Morozov, "Towards
Low-Overhead Resilience for Data Parallel Deep Learning", CCGrid 2022.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flipper.failstop.survivor import Survivor

PARTS: Final = 3
"""Buckets that a small model is cut into, about."""
MOST_BYTES: Final = 25 << 20
"""Of a bucket, as DistributedDataParallel has them."""


class LostContact(Exception):
    """A collective failed: some rank is gone, or hangs."""


@contextmanager
def contact() -> Iterator[None]:
    """What only talks to other ranks: its failure means that one of them is lost.

    Whoever keeps the error that is raised calls `alone` on it: the first one's frames hold on to the broken group.
    """
    try:
        yield
    except RuntimeError as error:
        raise LostContact(str(error).partition("\n")[0][:300]) from None


def alone(error: BaseException) -> BaseException:
    """The error without the frames that it and what led to it came through, and what these hold: a group lives on, and
    with it its connections, as long as an unfinished work of it does, and others wait for who has left it."""
    error.__context__ = None
    return error.with_traceback(None)


def bucketed(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in buckets: last ones first, as their gradients come; whole tensors, of one dtype and device.

    A bucket takes no more than a third of the model or 25 MB, but for a tensor that is larger by itself, and for one
    that follows next to nothing (a bias before its weight).
    """
    trained = [each for each in parameters if each.requires_grad][::-1]
    most = min(MOST_BYTES, -(-sum(each.nbytes for each in trained) // PARTS))
    buckets: list[list[nn.Parameter]] = []
    for parameter in trained:
        last = buckets[-1] if buckets else []
        held = sum(each.nbytes for each in last)
        fits = held + parameter.nbytes <= most or held < most / 8
        alike = all((each.dtype, each.device) == (parameter.dtype, parameter.device) for each in last)
        if last and fits and alike:
            last.append(parameter)
        else:
            buckets.append([parameter])
    return buckets


class Reducer:
    """Averages and applies the buckets of one model in order.

    optimizer: the recipe's, of all parameters; each bucket is updated by one like it that shares its state.
    survivor: this rank, which talks to the others. before: called in the thread before a bucket is averaged.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, survivor: Survivor, before: Callable[[int], None]
    ) -> None:
        self.buckets = bucketed(module.parameters())
        self.done: set[int] = set()
        self.rate = 1.0
        self._optimizer = optimizer
        self._optimizers = [_part_of(optimizer, bucket) for bucket in self.buckets]
        self._survivor = survivor
        self._before = before
        self._number = {parameter: k for k, bucket in enumerate(self.buckets) for parameter in bucket}
        self._missing: list[int] = []
        self._sent = 0
        self._work: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._active = False
        for parameter in self._number:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
        threading.Thread(target=self._serve, name="flipper-reducer", daemon=True).start()

    def begin(self) -> None:
        """Before a backward pass: no bucket is averaged yet."""
        self.done.clear()
        self._missing = [len(bucket) for bucket in self.buckets]
        self._sent, self._active = 0, True
        for optimizer in self._optimizers:
            for ours, theirs in zip(optimizer.param_groups, self._optimizer.param_groups, strict=True):
                ours.update({key: value for key, value in theirs.items() if key != "params"})
                ours["lr"] = theirs["lr"] if self.rate == 1 else theirs["lr"] * self.rate

    def finish(self) -> bool:
        """Wait for the buckets; returns False when some parameter got no gradient. Raises LostContact."""
        self._active = False
        self._work.put(None)
        error = self._ended.get()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its frames hold this one
        return self._sent == len(self.buckets)

    def average(self, number: int, scale: float = 1.0) -> None:
        """Average one bucket over all ranks and apply it."""
        bucket = self.buckets[number]
        flat = self._flat(bucket)
        if scale != 1:
            flat = flat * scale
        with contact():
            total = self._survivor.summed(flat)
        self._take(number, total)

    def share(self, number: int, donor: int, have: bool) -> None:
        """Take a bucket's average from the rank that has it, where it isn't applied yet. have: whether it is here."""
        flat = self._flat(self.buckets[number])
        with contact():
            self._survivor.share(flat, donor)
        if not have:
            self._take(number, flat)

    def _take(self, number: int, total: Tensor) -> None:
        bucket = self.buckets[number]
        parts = torch.split(total, [each.numel() for each in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(part.view_as(parameter.grad))
        self._optimizers[number].step()
        self.done.add(number)

    def _flat(self, bucket: list[nn.Parameter]) -> Tensor:
        return torch.cat([each.grad.reshape(-1) for each in bucket if each.grad is not None])

    def _arrived(self, parameter: nn.Parameter) -> None:
        """A gradient is there; send off the buckets that are whole, in order."""
        if not self._active:
            return
        self._missing[self._number[parameter]] -= 1
        while self._sent < len(self.buckets) and not self._missing[self._sent]:
            self._work.put(self._sent)
            self._sent += 1

    def _serve(self) -> None:
        error: BaseException | None = None
        while True:
            number = self._work.get()
            if number is None:
                self._ended.put(error)
                error = None
            elif error is None:
                try:
                    self._before(number)
                    self.average(number)
                except BaseException as problem:  # whoever waits for the buckets raises it
                    error = alone(problem)


def _part_of(optimizer: Optimizer, bucket: list[nn.Parameter]) -> Optimizer:
    """One like the optimizer, of these parameters only, with its state."""
    inside = set(bucket)
    part = copy.copy(optimizer)
    part.state = optimizer.state
    part.param_groups = [
        {**group, "params": [each for each in group["params"] if each in inside]} for group in optimizer.param_groups
    ]
    return part
