"""Every recipe by name under real layouts, and a user's own FILE.py:NAME with each way for it to be wrong."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cifar_folder
import pytest
import torch
from plain import one_thread

from flipper.errors import UsageError
from flipper.training import recipes, seeds
from flipper.training.layouts import Parallel
from flipper.training.recipes import BUILT_IN
from flipper.training.run import train
from flipper.training.spec import TrainSpec

OWN = """
import torch
from torch import nn
from flipper.training import Data, Recipe, accuracy

def data(folder):
    features = torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    targets = (features.sum(dim=1) > 2).long()
    return Data(features[:48], targets[:48], features[48:], targets[48:])

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)

OWN = Recipe("own", model, data, nn.functional.cross_entropy, accuracy, sgd, 16, cuts=("2",))
"""


def python(code: str, folder: Path) -> str:
    """What a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_and_summaries_cost_no_torch(tmp_path: Path) -> None:
    """Nor does a user's recipe, in the launching process."""
    (tmp_path / "own.py").write_text(OWN)
    code = (
        "import sys\n"
        "from flipper.training import recipes\n"
        "recipes.check_name('digits-mlp'); recipes.check_name('own.py:OWN')\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "from flipper.training import Data, Recipe, accuracy\n"
        "assert 'torch' in sys.modules\n"
        "print(Recipe.__name__, Data.__name__, accuracy.__name__)"
    )
    assert python(code, tmp_path) == "Recipe Data accuracy\n"


def test_each_recipe_bears_the_name_that_it_is_got_by() -> None:
    assert [recipes.get(name).name for name in BUILT_IN] == list(BUILT_IN)
    assert list(BUILT_IN) == sorted(BUILT_IN)


def test_each_recipe_names_children_of_its_model_to_cut_at_and_modules_to_split() -> None:
    for name in BUILT_IN:
        recipe = recipes.get(name)
        model = recipe.model()
        children = [child for child, _ in model.named_children()]
        assert [child for child in children if child in recipe.cuts] == list(recipe.cuts), name
        assert children[0] not in recipe.cuts, name
        assert recipe.tensor_plan.keys() <= {each for each, _ in model.named_modules()}, name


# The losses of the first three steps on one rank, with seed 1.
CURVES = {
    "cifar10-alexnet": [2.30294, 2.30644, 2.30769],
    "cifar10-resnet20": [2.4326, 2.12564, 1.85671],
    "cifar10-vgg": [2.49466, 1.89823, 1.29605],
    "digits-bf16": [2.29589, 2.31676, 2.30903],
    "digits-cnn": [2.59005, 2.40766, 1.97509],
    "digits-mlp": [2.31959, 2.30691, 2.31579],
    "mnist5k-cnn": [2.32178, 2.25924, 2.16147],
    "modadd-transformer": [3.95667, 3.99613, 3.93951],
    "modadd-transformer-large": [4.85129, 4.76325, 4.88309],
}

# Up to rounding, layouts are the same mathematics for these.
WITHOUT_BATCHNORM_AND_DROPOUT = ("cifar10-alexnet", "digits-bf16", "modadd-transformer")


def tolerance(name: str) -> float:
    """A last bit of bfloat16 is 0.8 percent of an activation."""
    return 1e-2 if name == "digits-bf16" else 2e-3


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_the_first_losses_of_a_run_on_one_rank(tmp_path: Path, name: str) -> None:
    cifar_folder.write(tmp_path)
    assert first_losses(name, "single", tmp_path) == pytest.approx(CURVES[name], rel=tolerance(name))


@pytest.mark.parametrize("layout", ["ddp:2", "tensor:2", "pipeline:2"])
@pytest.mark.parametrize("name", WITHOUT_BATCHNORM_AND_DROPOUT)
def test_losses_are_the_same_on_two_ranks(tmp_path: Path, name: str, layout: str) -> None:
    cifar_folder.write(tmp_path)
    assert first_losses(name, layout, tmp_path) == pytest.approx(CURVES[name], rel=tolerance(name))


@pytest.mark.parametrize("layout", ["ddp:2", "tensor:2", "pipeline:2"])
def test_losses_with_batchnorm_and_dropout_are_close_on_two_ranks(tmp_path: Path, layout: str) -> None:
    """A rank's share of the batch has its own statistics and dropout."""
    assert first_losses("mnist5k-cnn", layout, tmp_path) == pytest.approx(CURVES["mnist5k-cnn"], rel=5e-2)


# How many parts of a batch have BatchNorm's statistics of their own.
PARTS = {"tensor:2": 1, "fsdp:2": 2, "pipeline:2": 4}


@pytest.mark.parametrize(
    ("name", "layout"),
    [*itertools.product(["cifar10-resnet20", "modadd-transformer-large"], PARTS), ("cifar10-vgg", "pipeline:2")],
)
def test_the_large_recipes_losses_are_those_of_a_plain_loop_over_the_parts_of_a_batch(
    tmp_path: Path, name: str, layout: str
) -> None:
    cifar_folder.write(tmp_path)
    assert first_losses(name, layout, tmp_path, 2) == pytest.approx(by_parts(name, PARTS[layout], tmp_path), rel=1e-4)


def by_parts(name: str, parts: int, data_dir: Path) -> list[float]:
    """The losses of two steps by plain PyTorch, which adds up the gradients of the parts."""
    recipe = recipes.get(name)
    data = recipe.data(data_dir)
    losses = []
    with torch.random.fork_rng(), one_thread():
        torch.manual_seed(seeds.derive(1, "initial"))
        model = recipe.model()
        optimizer = recipe.optimizer(model.parameters())
        schedule = recipe.schedule(optimizer) if recipe.schedule else None
        for batch in seeds.batch_order(1, 0, len(data.train_targets)).split(recipe.batch_size)[:2]:
            optimizer.zero_grad()
            shares = [
                recipe.loss(model(data.train_features[part]), data.train_targets[part]) / parts
                for part in batch.tensor_split(parts)
            ]
            loss = torch.stack(shares).sum()
            loss.backward()
            optimizer.step()
            if schedule:
                schedule.step()
            losses.append(loss.item())
    return losses


def first_losses(name: str, layout: str, data_dir: Path, steps: int = 3) -> list[float]:
    losses: list[float] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            losses.append(event["loss"])

    train(TrainSpec(name, Parallel.parse(layout), steps=steps, seed=1, data_dir=data_dir), note)
    return losses


@pytest.mark.parametrize("layout", ["single", "ddp:2", "pipeline:2"])
def test_a_users_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    result = train(TrainSpec("own.py:OWN", Parallel.parse(layout), epochs=60, seed=1))
    assert result.steps == 180
    assert result.accuracy is not None
    assert result.accuracy > 0.8
    assert json.loads(json.dumps(result.record()))["recipe"] == "own.py:OWN"


def test_a_users_recipe_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_own.py").write_text(OWN)
    (tmp_path / "own.py").write_text("from beside_own import OWN as HERE\n")
    code = "from flipper.training import recipes; print(recipes.get('there/own.py:HERE').name)"
    (tmp_path / "there").symlink_to(tmp_path)
    assert python(code, tmp_path) == "own\n"


def test_a_users_recipe_may_define_dataclasses(tmp_path: Path) -> None:
    dataclass = "from dataclasses import dataclass\n@dataclass\nclass A:\n    a: int\n"
    (tmp_path / "own.py").write_text(f"from __future__ import annotations\n{dataclass}{OWN}")
    assert recipes.get(f"{tmp_path}/own.py:OWN").name == "own"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no-such", "", "no recipe named 'no-such'; known: "),
        ("none.py:OWN", "", "recipe 'none.py:OWN': no file none.py"),
        ("own.py", OWN, "recipe 'own.py': write FILE.py:NAME, where NAME is a Recipe at the top level of"),
        ("own.py:", OWN, "recipe 'own.py:': write FILE.py:NAME, "),
        (":OWN", OWN, "recipe ':OWN': write FILE.py:NAME, "),
        ("own.txt:OWN", OWN, "recipe 'own.txt:OWN': write FILE.py:NAME, "),
        ("own.py:OTHER", OWN, "no OTHER in own.py; its Recipes: OWN"),
        ("own.py:OTHER", "", "no OTHER in own.py; it has no Recipe at its top level"),
        ("own.py:model", OWN, "model in own.py is of type function, not a Recipe; its Recipes: OWN"),
        ("own.py:OWN", "\n1 / 0\n", "own.py can't be loaded: ZeroDivisionError: division by zero (line 2)"),
        ("own.py:OWN", "import nowhere", "own.py can't be loaded: ModuleNotFoundError: No module named 'nowhere' (l"),
        ("own.py:OWN", "x = = 1", "own.py can't be loaded: SyntaxError: invalid syntax (own.py, line 1)"),
        ("own.py:OWN", "raise SystemExit('no')", "own.py can't be loaded: SystemExit: no (line 1)"),
        ("own.py:OWN", "raise ValueError('a\\nb')", "own.py can't be loaded: ValueError: a (line 1)"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        recipes.get(name)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_error_of_a_users_file_in_the_ranks_is_the_runs_error(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("1 / 0\n")
    with pytest.raises(UsageError, match=r"own\.py can't be loaded: ZeroDivisionError: division by zero \(line 1\)$"):
        train(TrainSpec(f"{tmp_path}/own.py:OWN", Parallel.parse("ddp:2"), steps=1, seed=1))
