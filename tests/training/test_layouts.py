"""Every layout resumes exactly, from each format and each other layout's checkpoints, and learns what it should."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from rank_bodies import load_each
from safetensors.torch import load_file
from series import LAYOUTS, Run, spec, train_all

from flipper.training import recipes
from flipper.training.control import control
from flipper.training.launch import run_ranks
from flipper.training.spec import SUFFIXES, Parallel

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]

# The losses of the first three steps with seed 1. Without BatchNorm and dropout all layouts compute the same; with
# them, what counts is over which samples statistics are taken, and how many streams dropout is drawn from.
ALIKE = {
    "digits-bf16": [2.29589, 2.31676, 2.30903],
    "digits-mlp": [2.31959, 2.30691, 2.31579],
    "modadd-transformer": [3.95667, 3.99613, 3.93951],
}
BY_SHARE = {
    "digits-cnn": {
        "whole": [2.59005, 2.40766, 1.97509],
        "halves": [2.62231, 2.46414, 2.00057],
        "thirds": [2.57586, 2.41127, 1.97886],
        "micro-batches": [2.61899, 2.34137, 1.95933],
        "micro-batches of halves": [2.62748, 2.42907, 1.94970],
    },
    "mnist5k-cnn": {
        "whole": [2.32178, 2.25924, 2.16147],
        "halves": [2.32465, 2.27085, 2.15468],
        "thirds": [2.32180, 2.26961, 2.17377],
        "micro-batches": [2.32878, 2.28539, 2.16182],
        "micro-batches of halves": [2.32795, 2.27903, 2.18599],
    },
}
SHARES = {
    "whole": ("single", "tensor:2"),
    "halves": ("ddp:2", "hooks:2", "fsdp:2", "fsdp:2+tensor:2"),
    "thirds": ("ddp:3", "hooks:3", "fsdp:3"),
    "micro-batches": ("pipeline:2", "pipeline-1f1b:2"),
    "micro-batches of halves": ("ddp:2+pipeline:2", "ddp:2+pipeline-1f1b:2"),
}

OTHERS = ("pytorch", "hdf5", "dcp")
"""The formats other than the one that the control is run with."""

ELSEWHERE = 1e-3
"""Relative tolerance of pinned losses: another processor's kernels add in another order."""
ROUNDING = 1e-5
"""Relative tolerance between layouts on one machine: sums of the same numbers, in another order, over three steps."""
BFLOAT16 = 2e-3
"""The same where layers are bfloat16: a last bit is 0.8 percent of one activation, and a loss averages 64 samples."""


@dataclass
class Trained:
    """What one layout did: digits-cnn for three steps, its file in each format, and each recipe's first losses."""

    run: Run
    files: dict[str, Path]
    curves: dict[str, list[float]]
    halfway: Path
    """digits-mlp's checkpoint after two of its three steps."""
    stopped: dict[str, Path]
    """What the same run of digits-cnn saves in the formats of OTHERS when it ends after one step."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """One launch for each layout, at first use."""

    @functools.cache
    def train_under(layout: str) -> Trained:
        folder = tmp_path_factory.mktemp(layout.replace(":", ""))
        path = folder / "safetensors" / "step-000003.safetensors"
        curves = {name: spec(name, layout, seed=1, steps=3) for name in (*ALIKE, *BY_SHARE)}
        curves["digits-mlp"] = spec("digits-mlp", layout, seed=1, steps=3, save=folder / "mlp", save_every=2)
        stop = [spec("digits-cnn", layout, steps=1, save=folder / name, checkpoint_format=name) for name in OTHERS]
        first, *others = train_all(
            [
                spec("digits-cnn", layout, steps=3, save=folder / "safetensors"),
                spec("digits-cnn", layout, resume=path, steps=3, save=folder, checkpoint_format="pytorch"),
                spec("digits-cnn", layout, resume=path, steps=3, save=folder, checkpoint_format="hdf5"),
                *stop,
                *curves.values(),
            ]
        )
        stopped = {name: folder / name / f"step-000001{SUFFIXES[name]}" for name in OTHERS}
        assert {other.digests for other in others[:2]} == {first.digests}
        files = {"safetensors": path, "pytorch": folder / "step-000003.pt", "hdf5": folder / "step-000003.h5"}
        losses = {name: run.losses for name, run in zip(curves, others[2 + len(OTHERS) :], strict=True)}
        return Trained(first, files, losses, folder / "mlp" / "step-000002.safetensors", stopped)

    return train_under


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_control_holds_and_the_same_run_again_ends_in_the_same_bits(
    trained: Callable[[str], Trained], layout: str
) -> None:
    """BatchNorm, dropout and Adam included; the stop comes before DDP's buckets are rebuilt, the end after."""
    verdict = control(spec("digits-cnn", layout, steps=3))
    assert verdict.first_difference is None
    assert verdict.resumed.first_step == 1
    for result in (verdict.uninterrupted, verdict.resumed):
        assert (result.state_digest, result.resume_digest) == trained(layout).run.digests


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stopped_and_saved_in_the_other_formats_a_run_goes_on_exactly_on_fresh_ranks(
    trained: Callable[[str], Trained], layout: str
) -> None:
    onward = [spec("digits-cnn", layout, resume=path, steps=3) for path in trained(layout).stopped.values()]
    for checkpoint_format, run in zip(OTHERS, train_all(onward), strict=True):
        assert run.first_step == 1
        assert run.digests == trained(layout).run.digests, checkpoint_format


@pytest.mark.parametrize(
    ("layout", "checkpoint_format"),
    [
        ("single", "hdf5"),
        ("ddp:3", "pytorch"),
        ("hooks:2", "hdf5"),
        ("fsdp:2", "pytorch"),
        ("tensor:2", "hdf5"),
        ("pipeline:2", "pytorch"),
        ("pipeline-1f1b:2", "hdf5"),
        ("ddp:2+pipeline:2", "pytorch"),
        ("fsdp:2+tensor:2", "hdf5"),
    ],
)
def test_the_control_holds_in_the_other_formats(
    trained: Callable[[str], Trained], layout: str, checkpoint_format: str
) -> None:
    verdict = control(spec("digits-cnn", layout, steps=3, checkpoint_format=checkpoint_format))
    assert (verdict.first_difference, verdict.resumed.first_step) == (None, 1)
    digests = verdict.resumed.state_digest, verdict.resumed.resume_digest
    assert digests == trained(layout).run.digests


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layouts_checkpoint_is_loaded_to_the_bit(trained: Callable[[str], Trained], layout: str) -> None:
    """Model and optimizer, in each format, one over the other."""
    names = [list(SUFFIXES)[number % 3] for number in range(len(LAYOUTS))]
    files = [trained(writer).files[name] for writer, name in zip(LAYOUTS, names, strict=True)]
    parallel = Parallel.parse(layout)
    digests: list[str] = []
    run_ranks(
        functools.partial(load_each, "digits-cnn", parallel, tuple(files)),
        parallel.ranks,
        lambda event: digests.append(event["digest"]),
    )
    assert dict(zip(LAYOUTS, digests, strict=True)) == {each: trained(each).run.state_digest for each in LAYOUTS}


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("single", "fsdp:3"),
        ("ddp:3", "pipeline:2"),
        ("fsdp:3", "tensor:2"),
        ("pipeline-1f1b:2", "ddp:2+pipeline:2"),
        ("fsdp:2+tensor:2", "hooks:2"),
        ("ddp:2+pipeline:2", "single"),
    ],
)
def test_the_next_step_under_another_layout_is_the_same_up_to_rounding(
    trained: Callable[[str], Trained], writer: str, reader: str
) -> None:
    """Momentum included: the loss is that of the writer's own third step, of which SGD's buffers are a part."""
    (run,) = train_all([spec("digits-mlp", reader, resume=trained(writer).halfway, steps=3)])
    assert run.losses == pytest.approx(trained(writer).curves["digits-mlp"][2:], rel=ROUNDING)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_names_dtypes_and_shapes_in_a_file_are_torchs_own_whatever_the_layout(
    trained: Callable[[str], Trained], layout: str
) -> None:
    """Each format read without flipper; only the generators are as many as the ranks."""
    files = trained(layout).files
    flat = load_file(files["safetensors"])
    model = recipes.get("digits-cnn").model()
    model.load_state_dict(torch.load(files["pytorch"], weights_only=True)["model"])
    ranks = {f"rng.rank{rank}.cpu": torch.get_rng_state() for rank in range(trained(layout).run.spec.parallel.ranks)}
    name = torch.tensor(list(layout.encode()), dtype=torch.uint8)
    progress = {f"progress.{key}": torch.tensor(0) for key in ("step", "epoch", "batch", "seed")}
    assert shapes(flat) == shapes({**state_of(model), **progress, **ranks, "rng.layout": name})
    assert bytes(flat["rng.layout"].tolist()).decode() == layout
    for other in (nested(torch.load(files["pytorch"], weights_only=True)), from_hdf5(files["hdf5"])):
        assert shapes(other) == shapes(flat)
        assert all(torch.equal(tensor, flat[name]) for name, tensor in other.items())


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The names that a model's state and that of torch's Adam should have."""
    adam = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    names = [name for name, _ in model.named_parameters()]
    optimizer = {
        f"optimizer.{names[number]}.{key}": value
        for number, values in adam.state_dict()["state"].items()
        for key, value in values.items()
    }
    return {**{f"model.{name}": tensor for name, tensor in model.state_dict().items()}, **optimizer}


def shapes(tensors: dict[str, torch.Tensor]) -> Shapes:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted(tensors.items())}


def nested(tree: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dicts by their joined keys."""
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        found.update(nested(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return found


def from_hdf5(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and not name.startswith("flipper_"):  # the record of the structure
            found[name.replace("/", ".")] = torch.tensor(item[()])

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


@pytest.mark.parametrize(
    "layouts",
    [
        ("ddp:2", "hooks:2", "fsdp:2"),
        ("ddp:3", "hooks:3", "fsdp:3"),
        ("pipeline:2", "pipeline-1f1b:2"),
        ("ddp:2+pipeline:2", "ddp:2+pipeline-1f1b:2"),
    ],
)
def test_layouts_that_add_the_same_numbers_in_the_same_order_are_equal_to_the_bit(
    trained: Callable[[str], Trained], layouts: tuple[str, ...]
) -> None:
    assert len({trained(layout).run.state_digest for layout in layouts}) == 1
    assert len({tuple(trained(layout).run.losses) for layout in layouts}) == 1
    for name in (*ALIKE, *BY_SHARE):
        assert len({tuple(trained(layout).curves[name]) for layout in layouts}) == 1, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", ALIKE)
def test_without_batchnorm_and_dropout_losses_are_those_of_one_rank_up_to_rounding(
    trained: Callable[[str], Trained], recipe: str, layout: str
) -> None:
    tolerance = BFLOAT16 if recipe == "digits-bf16" else ROUNDING
    losses = trained(layout).curves[recipe]
    assert losses == pytest.approx(trained("single").curves[recipe], rel=tolerance)
    assert losses == pytest.approx(ALIKE[recipe], rel=ELSEWHERE)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("recipe", BY_SHARE)
def test_with_batchnorm_and_dropout_losses_depend_on_how_the_batch_is_shared_alone(
    trained: Callable[[str], Trained], recipe: str, share: str
) -> None:
    """Not on how the model is: tensor parallelism drops the same activations as one rank does."""
    first = trained(SHARES[share][0]).curves[recipe]
    assert first == pytest.approx(BY_SHARE[recipe][share], rel=ELSEWHERE)
    for layout in SHARES[share][1:]:
        assert trained(layout).curves[recipe] == pytest.approx(first, rel=ROUNDING), layout


def test_every_layout_stands_in_the_table_of_shares() -> None:
    assert sorted(layout for layouts in SHARES.values() for layout in layouts) == sorted(LAYOUTS)


@pytest.mark.parametrize("kind", ["ddp", "hooks", "fsdp"])
def test_the_backends_own_sum_of_two_ranks_is_the_ordered_one(kind: str) -> None:
    """a + b = b + a to the bit; of three numbers only up to rounding."""
    ordered, native = train_all([spec("digits-cnn", f"{kind}:2", steps=3, allreduce=a) for a in ("ordered", "native")])
    assert native.digests == ordered.digests
    ordered, native = train_all([spec("digits-mlp", f"{kind}:3", steps=3, allreduce=a) for a in ("ordered", "native")])
    assert native.losses == pytest.approx(ordered.losses, rel=ROUNDING)
