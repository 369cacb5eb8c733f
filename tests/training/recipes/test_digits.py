"""The recipes on scikit-learn's digits: their data's split, their sizes and dtypes, their first losses."""

from __future__ import annotations

import pytest
import torch
from plain import first_losses, parameter_count

from flipper.training import recipes
from flipper.training.recipes import digits

COUNTS = {"digits-mlp": 6_570, "digits-cnn": 10_026, "digits-bf16": 10_730}
FIRST = {
    "digits-mlp": [2.31355, 2.30015, 2.28191, 2.31268, 2.30344],
    "digits-cnn": [2.50222, 2.31855, 2.00449, 1.55378, 1.32610],
}


def test_every_fifth_image_is_for_testing_and_both_parts_have_all_digits() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    data = recipes.get("digits-mlp").data(None)
    assert (len(data.train_targets), len(data.test_targets)) == (1438, 359)
    assert data.test_features.reshape(-1, 64).mul(16).tolist() == images[4::5].tolist()
    assert data.test_targets.tolist() == labels[4::5].tolist()
    assert data.train_targets.bincount().tolist() == [151, 161, 143, 131, 147, 154, 150, 136, 127, 138]
    assert data.test_targets.bincount().min() >= 20


def test_they_are_the_same_wherever_scikit_learn_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = recipes.get("digits-mlp").data(None)
    digits.digits.cache_clear()
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    found = recipes.get("digits-mlp").data(None)
    assert found is not kept
    assert torch.equal(found.train_features, kept.train_features)
    assert torch.equal(found.train_targets, kept.train_targets)


@pytest.mark.parametrize("name", list(COUNTS))
def test_sizes(name: str) -> None:
    recipe = recipes.get(name)
    assert parameter_count(recipe) == COUNTS[name]
    output = recipe.model()(torch.zeros(2, 1, 8, 8))
    assert (output.shape, output.dtype) == ((2, 10), torch.float32)


@pytest.mark.parametrize("name", list(FIRST))
def test_first_losses(name: str) -> None:
    assert first_losses(recipes.get(name), 5) == pytest.approx(FIRST[name], rel=1e-3)


def test_first_losses_with_bfloat16() -> None:
    """Looser: a last bit of bfloat16 is 0.8 percent of an activation."""
    expected = [2.3031, 2.2753, 2.3036, 2.3316, 2.3188]
    assert first_losses(recipes.get("digits-bf16"), 5) == pytest.approx(expected, rel=1e-2)


def test_the_middle_layers_and_their_optimizer_state_are_bfloat16() -> None:
    recipe = recipes.get("digits-bf16")
    model = recipe.model()
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if name.endswith("weight")}
    narrow, wide = torch.bfloat16, torch.float32
    assert dtypes == {"fc1.weight": wide, "fc2.weight": narrow, "fc3.weight": narrow, "fc4.weight": wide}
    optimizer = recipe.optimizer(model.parameters())
    model(torch.zeros(2, 1, 8, 8)).sum().backward()
    optimizer.step()
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].dtype == parameter.dtype
