"""What a recipe is: a model, its data, loss, metric, optimizer, and where a pipeline may cut it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Data:
    """Samples first: features (n, ...) float32 and targets (n,) int64, to train on and to test with."""

    train_features: Tensor
    train_targets: Tensor
    test_features: Tensor
    test_targets: Tensor


@dataclass(frozen=True)
class Recipe:
    """One training job, whatever its layout.

    model: builds a fresh network, initialised from torch's global generator.
    loss: (output, target) -> the mean over samples, a scalar.
    accuracy: (output, target) -> the share of right answers, a scalar in [0, 1].
    batch_size: samples a step over all ranks; a last, smaller batch of an epoch is left out.
    cuts: names of the model's children at which a pipeline stage may begin, in model order.
    """

    name: str
    model: Callable[[], nn.Sequential]
    data: Callable[[], Data]
    loss: Callable[[Tensor, Tensor], Tensor]
    accuracy: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int
    cuts: tuple[str, ...]
