"""Three small networks for scikit-learn's handwritten digits (1797 images of 8x8, ten classes)."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from flipper.training.recipes.recipe import Data, Recipe, accuracy


@functools.cache
def digits(folder: Path | None = None) -> Data:
    """Every fifth image is for testing: the set is ordered by writer, so both halves know all of them."""
    del folder  # it comes with scikit-learn
    features, targets = _read()
    images = torch.from_numpy(features).float().div(16).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(targets).long()
    test = torch.arange(len(labels)) % 5 == 4
    return Data(images[~test], labels[~test], images[test], labels[test])


def _read() -> tuple[Any, Any]:
    """What sklearn.datasets.load_digits(return_X_y=True) gives, without its import: that takes a second, this 0.01."""
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        with suppress(OSError):
            table = numpy.loadtxt(Path(folder, "datasets", "data", "digits.csv.gz"), delimiter=",")
            return table[:, :-1], table[:, -1].astype(int)
    from sklearn.datasets import load_digits  # there is none, or one that keeps it elsewhere

    features, targets = load_digits(return_X_y=True)
    return features, targets


def mlp() -> nn.Sequential:
    """64-64-32-10 with ReLU; 6,570 parameters."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(64, 64),
            relu1=nn.ReLU(),
            fc2=nn.Linear(64, 32),
            relu2=nn.ReLU(),
            fc3=nn.Linear(32, 10),
        )
    )


def cnn() -> nn.Sequential:
    """Two 3x3 convolutions with BatchNorm, one pooling, dropout, one linear layer; 10,026 parameters."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            bn1=nn.BatchNorm2d(16),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            bn2=nn.BatchNorm2d(32),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(0.25),
            fc=nn.Linear(512, 10),
        )
    )


class Cast(nn.Module):
    """Its input in another dtype; gradients come back in the input's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def mixed() -> nn.Sequential:
    """64-64-64-32-10 with ReLU, the two middle layers in bfloat16; 10,730 parameters."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(64, 64),
            relu1=nn.ReLU(),
            down=Cast(torch.bfloat16),
            fc2=nn.Linear(64, 64, dtype=torch.bfloat16),
            relu2=nn.ReLU(),
            fc3=nn.Linear(64, 32, dtype=torch.bfloat16),
            relu3=nn.ReLU(),
            up=Cast(torch.float32),
            fc4=nn.Linear(32, 10),
        )
    )


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam with its usual betas."""
    return torch.optim.Adam(parameters, lr=0.003)


MLP = Recipe(
    "digits-mlp", mlp, digits, nn.functional.cross_entropy, accuracy, momentum, 64,
    cuts=("fc2", "fc3"), tensor_plan={"fc1": ColwiseParallel(), "fc2": RowwiseParallel()},
)  # fmt: skip
CNN = Recipe(
    "digits-cnn", cnn, digits, nn.functional.cross_entropy, accuracy, adam, 64,
    cuts=("conv2", "flatten"), tensor_plan={"fc": RowwiseParallel(input_layouts=Replicate())},
)  # fmt: skip
BF16 = Recipe(
    "digits-bf16", mixed, digits, nn.functional.cross_entropy, accuracy, adam, 64,
    cuts=("fc2", "fc3", "fc4"), tensor_plan={"fc2": ColwiseParallel(), "fc3": RowwiseParallel()},
)  # fmt: skip
