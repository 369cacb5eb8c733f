"""The bucketed reducer: gradients are averaged, and weights updated, while the backward pass goes on.

Bucket k-1 is summed in rank order, by gloo's own threads, while autograd computes bucket k, and applied as soon as the
backward pass comes to the next one. So at any moment some layers are updated and some are not, as in the source:
Nicolae, Hobson, Yildiz, Peterka, Morozov, "Towards Low-Overhead Resilience for Data Parallel Deep Learning", CCGrid
2022.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flipper.errors import UsageError
from flipper.failstop.survivor import Sum, Survivor

PARTS: Final = 3
"""Buckets that a small model is cut into, about."""
MOST_BYTES: Final = 25 << 20
"""Of a bucket, as DistributedDataParallel has them."""


class LostContact(Exception):
    """A collective failed: some rank is gone, or hangs."""


@contextmanager
def contact() -> Iterator[None]:
    """What only talks to other ranks: its failure means that one of them is lost.

    The error that is raised is not to be kept, only what it says: it leads to frames that hold an unfinished work. As
    long as that lives so does the broken group, with its connections, and others wait for this rank.
    """
    try:
        yield
    except RuntimeError as error:
        raise LostContact(str(error).partition("\n")[0][:300]) from None


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


def check_bucketwise(optimizer: Optimizer) -> None:
    """Raise UsageError for an optimizer whose step looks at all gradients, as clipping by their norm does.

    A bucket is applied while others still get their gradients, so that the norm isn't known yet. What can be seen is a
    hook of the step, and a step around that of one of torch's optimizers; torch's own take each parameter by itself.
    """
    hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    kind = type(optimizer)
    torchs = any(base.__module__.startswith("torch.optim") for base in kind.__mro__ if base not in (Optimizer, object))
    if hooks or (torchs and not kind.step.__module__.startswith("torch.optim")):
        does = "has hooks of its step" if hooks else f"is a {kind.__name__} with a step of its own"
        raise UsageError(
            f"the recipe's optimizer {does}, as for gradient clipping, and where ranks may die weights are updated "
            "before all gradients are there, whose norm isn't known yet: leave it out"
        )


class Reducer:
    """Averages and applies the buckets of one model in order.

    optimizer: the recipe's, of all parameters; each bucket is updated by one like it that shares its state.
    survivor: this rank, which talks to the others. before: called before a bucket is averaged.
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
        self._begun: dict[int, Sum] = {}
        self._gathered: dict[int, Sum] = {}
        self._lost: str | None = None
        self._active = False
        for parameter in self._number:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Before a backward pass: no bucket is averaged yet."""
        self.done.clear()
        self._missing = [len(bucket) for bucket in self.buckets]
        self._sent, self._active, self._lost = 0, True, None
        for optimizer in self._optimizers:
            for ours, theirs in zip(optimizer.param_groups, self._optimizer.param_groups, strict=True):
                ours.update({key: value for key, value in theirs.items() if key != "params"})
                ours["lr"] = theirs["lr"] if self.rate == 1 else theirs["lr"] * self.rate

    def finish(self) -> bool:
        """Wait for the buckets; returns False when some parameter got no gradient. Raises LostContact."""
        self._active = False
        self._attempt(self.settle)
        if self._lost is not None:
            raise LostContact(self._lost)
        return self._sent == len(self.buckets)

    def settle(self) -> None:
        """Average and apply all buckets that were begun. Raises LostContact."""
        self._gather()
        self._apply()

    def rest(self, donors: Mapping[int, int], scale: float) -> None:
        """Average over all ranks the buckets that nobody has averaged, and apply those that aren't applied here.

        donors: bucket -> the rank that has its average. scale: of what is summed. Raises LostContact.
        """
        try:
            for number in range(len(self.buckets)):
                if number in donors:
                    self._before(number)
                    self._share(number, donors[number])
                else:
                    self._begin(number, scale)
            self.settle()
        except LostContact:
            self._let_go()
            raise

    def _share(self, number: int, donor: int) -> None:
        """Take a bucket's average from the rank that has it, where it isn't applied yet."""
        flat = self._flat(number)
        with contact():
            self._survivor.share(flat, donor)
        if number not in self.done:
            self._take(number, flat)

    def _arrived(self, parameter: nn.Parameter) -> None:
        """A gradient is there; begin the buckets that are whole, in order."""
        if not self._active:
            return
        self._missing[self._number[parameter]] -= 1
        while self._sent < len(self.buckets) and not self._missing[self._sent]:
            self._attempt(functools.partial(self._begin, self._sent))
            self._sent += 1

    def _begin(self, number: int, scale: float = 1.0) -> None:
        """The first part of one bucket's sum, the second of the one before, and the one before that is applied.

        Every rank does them in this order, wherever its backward pass is.
        """
        self._before(number)
        flat = self._flat(number)
        with contact():
            total = self._survivor.begin_sum(flat if scale == 1 else flat * scale)
        self._apply()
        self._gather()
        self._begun[number] = total

    def _gather(self) -> None:
        for number in list(self._begun):
            with contact():
                self._begun[number].gather()
            self._gathered[number] = self._begun.pop(number)

    def _apply(self) -> None:
        for number in list(self._gathered):
            with contact():
                total = self._gathered[number].result()
            del self._gathered[number]
            self._take(number, total)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do it unless contact is lost; backward passes go on then, since all gradients may be of use."""
        if self._lost is None:
            try:
                work()
            except LostContact as error:
                self._lost = str(error)
                self._let_go()

    def _let_go(self) -> None:
        """Of the sums under way, which hang on a broken group."""
        self._begun.clear()
        self._gathered.clear()

    def _take(self, number: int, total: Tensor) -> None:
        gradients = [each.grad for each in self.buckets[number] if each.grad is not None]
        parts = torch.split(total, [each.numel() for each in gradients])
        torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients, strict=True)])
        self._optimizers[number].step()
        self.done.add(number)

    def _flat(self, number: int) -> Tensor:
        return torch.cat([each.grad.reshape(-1) for each in self.buckets[number] if each.grad is not None])


def _part_of(optimizer: Optimizer, bucket: list[nn.Parameter]) -> Optimizer:
    """One like the optimizer, of these parameters only, with its state."""
    inside = set(bucket)
    part = copy.copy(optimizer)
    part.state = optimizer.state
    part.param_groups = [
        {**group, "params": [each for each in group["params"] if each in inside]} for group in optimizer.param_groups
    ]
    return part
