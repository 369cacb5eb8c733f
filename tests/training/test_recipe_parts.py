"""A recipe whose fields or functions are of the wrong kind is refused by name; its errors tell their line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from series import spec, train_all
from torch import nn

from flipper.errors import FlipperError, MismatchError, TrainingError, UsageError
from flipper.training import Data, Recipe, accuracy
from flipper.training.control import control
from flipper.training.faults_file import faults_of
from flipper.training.layouts import Parallel
from flipper.training.recipes import parts, user
from flipper.training.run import train
from flipper.training.spec import TrainSpec

X, Y = torch.rand(8, 4), torch.tensor([0, 1] * 4)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


RIGHT = Recipe("own", model, lambda folder: Data(X, Y, X, Y), nn.functional.cross_entropy, accuracy, torch.optim.SGD, 4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", 3, "Recipe 3: name must be a text, not 3"),
        ("optimizer", None, "Recipe own: optimizer must be a function, not None"),
        ("data", None, "Recipe own: data must be a function, not None"),
        ("loss", "mse", "Recipe own: loss must be a function, not 'mse'"),
        ("batch_size", 0, "Recipe own: batch_size must be a natural number above 0, not 0"),
        ("batch_size", 16.0, "batch_size must be a natural number above 0, not 16.0"),
        ("batch_size", True, "batch_size must be a natural number above 0, not True"),
        ("epochs", -1, "epochs must be a natural number, not -1"),
        ("epochs", None, "epochs must be a natural number, not None"),
        ("cuts", "fc2", "cuts must be a tuple of names, as (\"fc2\",) is, not 'fc2'"),
        ("cuts", (2,), 'cuts must be a tuple of names, as ("fc2",) is, not (2,)'),
        ("tensor_plan", ["0"], "tensor_plan must be a dict from module names to parallel styles, not ['0']"),
        ("schedule", 0.1, "schedule must be a function of the optimizer, or None, not 0.1"),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_by_its_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(RIGHT, **{field: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((X.numpy(), Y, X, Y), "train_features is of type ndarray, not a torch.Tensor (torch.as_tensor takes arrays)"),
        ((X, [0, 1], X, Y), "train_targets is of type list, not a torch.Tensor"),
        ((X[:3], Y, X, Y), "train_features has 3 samples, train_targets 8"),
        ((X, Y, X, Y[:5]), "test_features has 8 samples, test_targets 5"),
        ((X, Y, X[:0], Y[:0]), "there are no samples to test with"),
        ((X, Y, X, torch.tensor(1)), "test_targets is a single number; its first axis must count samples"),
    ],
)
def test_data_that_do_not_fit_together_are_refused(tensors: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Data(*tensors)
    assert str(caught.value).startswith("Data: ")
    assert message in str(caught.value)


OUTPUT = torch.rand(8, 2, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "returned", "message"),
    [
        ("model", None, "own: its model returns an object of type NoneType, not an nn.Module"),
        ("model", nn.ReLU(), "own: its model has no parameters to train"),
        ("data", (X, Y, X, Y), "own: its data returns an object of type tuple, not a flipper.training.Data"),
        ("data", Data(X[:3], Y[:3], X, Y), "own trains on 4 samples a step; its data has 3"),
        ("optimizer", None, "own: its optimizer returns an object of type NoneType, not a torch.optim.Optimizer"),
        ("optimizer", torch.optim.LBFGS([OUTPUT]), "own: LBFGS takes several passes a step; flipper trains with one"),
        ("schedule", 0.1, "own: its schedule returns an object of type float, not one of torch's learning-rate sch"),
        (
            "schedule",
            torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([OUTPUT])),
            "own: ReduceLROnPlateau steps by the loss; ",
        ),
        ("loss", 1.5, "own: its loss returns an object of type float, not a tensor"),
        ("loss", OUTPUT.sum(dim=1), "own: its loss returns [8] numbers; take their mean"),
        ("loss", torch.tensor(3), "own: its loss has no gradient: "),
        ("loss", OUTPUT.detach().sum(), "own: its loss has no gradient: "),
    ],
)
def test_what_a_function_returns_is_refused_by_its_name(function: str, returned: Any, message: str) -> None:
    recipe = replace(RIGHT, **{function: lambda *arguments: returned})
    takes: dict[str, tuple[Any, ...]] = {"data": (None,), "loss": (OUTPUT, Y)}
    arguments = takes.get(function, () if function == "model" else (None,))
    with pytest.raises(UsageError) as caught:
        getattr(parts, f"{function}_of")(recipe, *arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("cuts", [("9",), ("0",), ("2", "1"), ("1", "1")])
def test_cuts_must_be_children_after_the_first_in_order(cuts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"are not some of its model's children after the first, in their order: 1, 2"):
        parts.model_of(replace(RIGHT, cuts=cuts))
    assert isinstance(parts.model_of(replace(RIGHT, cuts=("1", "2"))), nn.Sequential)


def test_an_accuracy_may_be_any_number_and_nothing_else() -> None:
    for right in (0.5, torch.tensor(0.5), numpy.float32(0.5)):
        scores = parts.scores_of(replace(RIGHT, accuracy=lambda output, target, right=right: right), OUTPUT, Y)
        assert scores[1] == 0.5
    for wrong in (None, "half", torch.rand(3)):
        recipe = replace(RIGHT, accuracy=lambda output, target, wrong=wrong: wrong)
        with pytest.raises(UsageError, match=r"^own: its accuracy returns an object of type \w+, not a single number$"):
            parts.scores_of(recipe, OUTPUT, Y)


OWN = """import random
import numpy
import torch
from torch import nn
from flipper.training import Data, Recipe, accuracy

def data(folder):
    {data}
    features = torch.rand(64, 4)
    order = numpy.random.permutation(64)
    targets = (features[order].sum(dim=1) > 1.5 + random.random()).long()
    return Data(features[:48], targets[:48], features[48:], targets[48:])

class Noise(nn.Module):
    def forward(self, x):
        {noise}
        return x * random.random() + float(numpy.random.rand())

def model():
    return nn.Sequential(nn.Linear(4, 8), Noise(), nn.Flatten(), nn.Linear(8, 2))

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)

OWN = Recipe("own", model, data, nn.functional.cross_entropy, accuracy, sgd, 16, cuts=("2",))
"""


def own(folder: Path, **lines: str) -> str:
    """Its name."""
    (folder / "own.py").write_text(OWN.format(**{"data": "pass", "noise": "pass", **lines}))
    return f"{folder}/own.py:OWN"


@pytest.mark.parametrize(
    ("lines", "layout", "kind", "message"),
    [
        ({"data": "open('/nowhere')"}, "single", TrainingError, "FileNotFoundError: {} '/nowhere' (own.py, line 8)"),
        ({"noise": "1 / 0"}, "single", TrainingError, "ZeroDivisionError: {} (own.py, line 16; in step 1)"),
        ({"noise": "raise ValueError('a\\nb')"}, "pipeline:2", TrainingError, "ValueError: a (own.py, line 16)"),
        ({"noise": "return x, x"}, "pipeline:2", UsageError, "the stage of 0, 1 hands on a tuple; a pipeline sends"),
    ],
)
def test_an_error_in_a_users_function_tells_its_file_and_line(
    tmp_path: Path, lines: dict[str, str], layout: str, kind: type[FlipperError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        train(TrainSpec(own(tmp_path, **lines), Parallel.parse(layout), steps=1, seed=1))
    for part in message.split("{}"):
        assert part in str(caught.value)


def test_an_error_elsewhere_tells_no_line_of_a_recipe() -> None:
    with pytest.raises(UsageError) as caught:
        replace(RIGHT, batch_size=0)
    assert user.place(caught.value) is None


@pytest.mark.parametrize("layout", ["ddp:2", "pipeline:2"])
def test_recipes_that_draw_from_the_global_generators_have_one_set_of_data_and_resume_exactly(
    tmp_path: Path, layout: str
) -> None:
    """Python's, numpy's and torch's: a second run in the same processes finds them where the first left them."""
    name = own(tmp_path)
    first, second, other = train_all([spec(name, layout, steps=4, seed=seed) for seed in (1, 1, 2)])
    assert first.digests == second.digests
    assert first.losses == second.losses
    assert other.losses != first.losses
    assert control(spec(name, layout, steps=5)).first_difference is None


def test_a_stage_may_hand_on_a_tensor_that_is_not_contiguous(tmp_path: Path) -> None:
    """Its losses are those of one rank."""
    name = own(tmp_path, noise="return x.view(-1, 2, 4).transpose(1, 2)")
    one, two = (train_all([spec(name, layout, steps=3)])[0] for layout in ("single", "pipeline:2"))
    assert two.losses == pytest.approx(one.losses, rel=1e-5)


def test_a_stage_may_look_at_numbers(tmp_path: Path) -> None:
    """What it hands on is found out without data where that goes, and with some where it doesn't."""
    name = own(tmp_path, noise="return x * (2 if x.sum().item() > -1e9 else 1)")
    one, two = (train_all([spec(name, layout, steps=3)])[0] for layout in ("single", "pipeline:2"))
    assert two.losses == pytest.approx(one.losses, rel=1e-5)


def with_a_parameter(folder: Path, made: str) -> str:
    """The recipe with one more parameter, named 1.unused, that no gradient reaches."""
    name = own(folder)
    file = folder / "own.py"
    init = INIT.replace("torch.ones(4)", made)
    file.write_text(file.read_text().replace("class Noise(nn.Module):\n", f"class Noise(nn.Module):\n{init}"))
    return name


@pytest.mark.parametrize(
    ("made", "message"), [("torch.tensor(1.0)", "has no axis to shard"), ("torch.ones(0, 4)", "has no elements")]
)
def test_parameters_that_fsdp_cannot_shard_are_named(tmp_path: Path, made: str, message: str) -> None:
    name = with_a_parameter(tmp_path, made)
    with pytest.raises(UsageError, match=rf"^fsdp:2: 1\.unused {message}; run the recipe under another layout$"):
        train(TrainSpec(name, Parallel.parse("fsdp:2"), steps=1, seed=1))
    assert control(spec(name, "hooks:2", steps=2)).first_difference is None


@pytest.mark.parametrize("layout", ["single", "hooks:2", "fsdp:2"])
def test_local_gradients_that_never_come_are_not_said_to_be_struck(tmp_path: Path, layout: str) -> None:
    """A frozen parameter has none to draw from; one that turns out to be unused is an error."""
    faults = faults_of({"layer": "gradient.1.unused", "seed": 1, "target": "local-gradient"})
    frozen = with_a_parameter(tmp_path, "torch.ones(4), requires_grad=False")
    with pytest.raises(UsageError, match=r"^--layer 'gradient\.1\.unused' matches no tensor"):
        train(spec(frozen, layout, steps=1, at=0, inject=faults))
    unused = with_a_parameter(tmp_path, "torch.ones(4)")
    with pytest.raises(MismatchError, match=r"^gradient\.1\.unused did not appear in this step: nothing could be"):
        train(spec(unused, layout, steps=1, at=0, inject=faults))


def test_a_parameter_without_a_gradient_is_trained_round_but_by_ddp(tmp_path: Path) -> None:
    """Where it is unused on every rank."""
    name = with_a_parameter(tmp_path, "torch.ones(4)")
    with pytest.raises(UsageError, match=r"^some of own's parameters got no gradient in the last step, .*hooks:N$"):
        train(TrainSpec(name, Parallel.parse("ddp:2"), steps=3, seed=1))
    for layout in ("single", "hooks:2", "fsdp:2", "pipeline:2"):
        verdict = control(spec(name, layout, steps=4))
        assert verdict.first_difference is None


INIT = """    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(4))

"""


def test_a_stage_without_parameters_is_refused(tmp_path: Path) -> None:
    name = own(tmp_path)
    file = tmp_path / "own.py"
    file.write_text(file.read_text().replace('cuts=("2",)', 'cuts=("1", "3")'))
    with pytest.raises(UsageError, match=r"^pipeline:3: own has no parameters to train in its stage of 1, 2$"):
        train(TrainSpec(name, Parallel.parse("pipeline:3"), steps=1, seed=1))
