"""Three convolutional networks for CIFAR-10 (60,000 images of 32x32 in colour, ten classes)."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from flipper.training.recipes.cifar10_files import cifar10
from flipper.training.recipes.recipe import Recipe, accuracy
from flipper.training.recipes.schedules import tenth_at

EPOCHS: Final = 164  # 64,000 steps of 128, as in He et al., where the rate falls at 32,000 and 48,000

# Of the training images' channels in [0, 1].
MEAN: Final = (0.4914, 0.4822, 0.4465)
DEVIATION: Final = (0.2470, 0.2435, 0.2616)


class Normalise(nn.Module):
    """Images (n, 3, 32, 32) uint8 to float32 of mean 0 and deviation 1 a channel, over the training set.

    Part of the model, so that the data stays a quarter the size.
    """

    def forward(self, images: Tensor) -> Tensor:
        scaled = images.float().div(255)
        mean, deviation = (scaled.new_tensor(values).reshape(3, 1, 1) for values in (MEAN, DEVIATION))
        return (scaled - mean) / deviation


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A of He et al.).

    Where the block halves the image it doubles the channels: the shortcut takes every other pixel, and zeros for the
    new channels.
    """

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.stride = channels // channels_in
        self.conv1 = nn.Conv2d(channels_in, channels, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.relu(self.bn1(self.conv1(x)))
        inner = self.bn2(self.conv2(inner))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        added = inner.shape[1] - x.shape[1]
        return nn.functional.relu(inner + nn.functional.pad(shortcut, (0, 0, 0, 0, added // 2, added // 2)))


def resnet20() -> nn.Sequential:
    """ResNet-20 for CIFAR-10: a stem, nine blocks of 16, 32 and 64 channels, a head; 269,722 parameters.

    Source: K. He et al., Deep residual learning (2016), section 4.2; its initialisation is that of K. He et al.,
    Delving deep into rectifiers (2015).
    """
    stem = OrderedDict(
        normalise=Normalise(), conv=nn.Conv2d(3, 16, 3, padding=1, bias=False), bn=nn.BatchNorm2d(16), relu=nn.ReLU()
    )
    head = OrderedDict(pool=nn.AvgPool2d(8), flatten=nn.Flatten(), fc=nn.Linear(64, 10))
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = {f"block{number}": Block(*widths[number - 1 : number + 1]) for number in range(1, 10)}
    return _he(nn.Sequential(OrderedDict(stem=nn.Sequential(stem), **blocks, head=nn.Sequential(head))))


def alexnet() -> nn.Sequential:
    """AlexNet as it is usually fitted to 32x32 images: five convolutions and one linear layer; 2,472,266 parameters.

    The first convolution is 11x11 with stride 4 and padding 5, poolings are 2x2; without dropout and local response
    normalisation. Source: W. Yang's classification networks for CIFAR, after A. Krizhevsky et al. (2012).
    """
    return nn.Sequential(
        OrderedDict(
            normalise=Normalise(),
            conv1=nn.Conv2d(3, 64, 11, stride=4, padding=5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(64, 192, 5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(192, 384, 3, padding=1),
            relu3=nn.ReLU(),
            conv4=nn.Conv2d(384, 256, 3, padding=1),
            relu4=nn.ReLU(),
            conv5=nn.Conv2d(256, 256, 3, padding=1),
            relu5=nn.ReLU(),
            pool5=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc=nn.Linear(256, 10),
        )
    )


def vgg11() -> nn.Sequential:
    """VGG-11 (configuration A) for 32x32 images, with BatchNorm and one linear layer; 9,231,114 parameters.

    Source: K. Simonyan and A. Zisserman (2015), table 1; its rate and weight decay; of three
    linear layers one is left, as is usual for CIFAR.
    """
    widths = (3, 64, 128, 256, 256, 512, 512, 512, 512)
    layers: OrderedDict[str, nn.Module] = OrderedDict(normalise=Normalise())
    for number in range(1, 9):
        layers[f"conv{number}"] = nn.Conv2d(widths[number - 1], widths[number], 3, padding=1)
        layers[f"bn{number}"] = nn.BatchNorm2d(widths[number])
        layers[f"relu{number}"] = nn.ReLU()
        if number in (1, 2, 4, 6, 8):
            layers[f"pool{number}"] = nn.MaxPool2d(2)
    return _he(nn.Sequential(OrderedDict(**layers, flatten=nn.Flatten(), fc=nn.Linear(512, 10))))


def _he(model: nn.Sequential) -> nn.Sequential:
    """The model with its convolutions' weights drawn for ReLUs."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def momentum(lr: float, weight_decay: float, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum 0.9."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay)


RESNET20 = Recipe(
    "cifar10-resnet20", resnet20, cifar10, nn.functional.cross_entropy, accuracy,
    functools.partial(momentum, 0.1, 1e-4), 128, schedule=tenth_at(32_000, 48_000), epochs=EPOCHS,
    cuts=(*(f"block{number}" for number in range(1, 10)), "head"),
    tensor_plan={"head.fc": RowwiseParallel(input_layouts=Replicate())},
)  # fmt: skip
ALEXNET = Recipe(
    "cifar10-alexnet", alexnet, cifar10, nn.functional.cross_entropy, accuracy,
    functools.partial(momentum, 0.01, 5e-4), 128, schedule=tenth_at(32_000, 48_000), epochs=EPOCHS,
    cuts=("conv2", "conv3", "conv4", "conv5", "flatten"),
    tensor_plan={"fc": RowwiseParallel(input_layouts=Replicate())},
)  # fmt: skip
VGG = Recipe(
    "cifar10-vgg", vgg11, cifar10, nn.functional.cross_entropy, accuracy,
    functools.partial(momentum, 0.01, 5e-4), 128, schedule=tenth_at(32_000, 48_000), epochs=EPOCHS,
    cuts=(*(f"conv{number}" for number in range(2, 9)), "flatten"),
    tensor_plan={"fc": RowwiseParallel(input_layouts=Replicate())},
)  # fmt: skip
