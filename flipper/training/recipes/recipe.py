"""What a recipe is: a model, its data, loss, metric, optimizer and schedule, and how it may be split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim.lr_scheduler import LRScheduler

from flipper.errors import UsageError, shortened


@dataclass(frozen=True)
class Data:
    """Samples first: features (n, ...) of any dtype and targets (n,) int64, to train on and to test with.

    Raises UsageError for what is no tensor, for features and targets of other lengths, and for nothing to test with.
    """

    train_features: Tensor
    train_targets: Tensor
    test_features: Tensor
    test_targets: Tensor

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise UsageError(f"Data: {name} is of type {kind}, not a torch.Tensor (torch.as_tensor takes arrays)")
            if not value.dim():
                raise UsageError(f"Data: {name} is a single number; its first axis must count samples")
        for part in ("train", "test"):
            features, targets = (len(getattr(self, f"{part}_{what}")) for what in ("features", "targets"))
            if features != targets:
                raise UsageError(f"Data: {part}_features has {features} samples, {part}_targets {targets}")
        if not len(self.test_targets):
            raise UsageError("Data: there are no samples to test with")


@dataclass(frozen=True)
class Recipe:
    """One training job, whatever its layout.

    model: builds a fresh network, initialised from torch's global generator; for a pipeline an nn.Sequential.
    data: the samples, given the folder of --data-dir (None without it).
    loss: (output, target) -> the mean over samples, a scalar.
    accuracy: (output, target) -> the share of right answers, a scalar in [0, 1].
    batch_size: samples a step over all ranks; a last, smaller batch of an epoch is left out.
    cuts: names of the model's children at which a pipeline stage may begin, in model order.
    schedule: of the learning rate, stepped after each step; None keeps it as the optimizer has it.
    tensor_plan: what tensor parallelism splits: the module's name and how, as parallelize_module takes it; what it
        doesn't name is replicated.
    epochs: how long it trains when nobody says.
    Raises UsageError for a field of another kind.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[Path | None], Data]
    loss: Callable[[Tensor, Tensor], Tensor]
    accuracy: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int
    cuts: tuple[str, ...] = ()
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    tensor_plan: Mapping[str, ParallelStyle] = field(default_factory=dict)
    epochs: int = 10

    def __post_init__(self) -> None:
        kinds = {
            "name": (isinstance(self.name, str), "a text"),
            "batch_size": (type(self.batch_size) is int and self.batch_size > 0, "a natural number above 0"),
            "epochs": (type(self.epochs) is int and self.epochs >= 0, "a natural number"),
            "cuts": (_are_names(self.cuts), 'a tuple of names, as ("fc2",) is'),
            "tensor_plan": (isinstance(self.tensor_plan, Mapping), "a dict from module names to parallel styles"),
            "schedule": (self.schedule is None or callable(self.schedule), "a function of the optimizer, or None"),
            **{each: (callable(getattr(self, each)), "a function") for each in _FUNCTIONS},
        }
        for field_name, (right, wanted) in kinds.items():
            if not right:
                seen = repr(getattr(self, field_name))
                raise UsageError(f"Recipe {self.name}: {field_name} must be {wanted}, not {shortened(seen)}")


_FUNCTIONS: Final = ("model", "data", "loss", "accuracy", "optimizer")


def _are_names(cuts: object) -> bool:
    """A text, too, is a sequence of texts, but never meant as one."""
    return isinstance(cuts, list | tuple) and all(isinstance(name, str) for name in cuts)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of samples whose largest output is the target's."""
    return (output.argmax(dim=1) == target).double().mean()
