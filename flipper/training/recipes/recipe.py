"""What a recipe is: a model, its data, loss, metric, optimizer and schedule, and how it may be split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True)
class Data:
    """Samples first: features (n, ...) of any dtype and targets (n,) int64, to train on and to test with."""

    train_features: Tensor
    train_targets: Tensor
    test_features: Tensor
    test_targets: Tensor


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


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of samples whose largest output is the target's."""
    return (output.argmax(dim=1) == target).double().mean()
