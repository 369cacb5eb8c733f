"""Files of Keras 2 and Chainer, made by h5py as these libraries make them: struck, converted, undone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_tools import contents, xored

from flipper.checkpoints.convert import convert
from flipper.checkpoints.formats import open_checkpoint
from flipper.faults.effects import FLIP
from flipper.faults.plan import FaultPlan, Target, plan_of
from flipper.injection.inject import inject
from flipper.injection.undo import undo
from flipper.injection.verify import verify

NOISE = np.random.default_rng(7)


def noise(*shape: int) -> Any:
    return NOISE.normal(size=shape).astype("f4")


def keras_weights(group: Any, layers: dict[str, dict[str, Any]]) -> None:
    """As keras.engine.saving.save_weights_to_hdf5_group of Keras 2 does: weights below the layer, called like it."""
    group.attrs["layer_names"] = [name.encode() for name in layers]
    group.attrs["backend"] = b"tensorflow"
    group.attrs["keras_version"] = b"2.3.1"
    for layer, weights in layers.items():
        below = group.create_group(layer)
        names = [f"{layer}/{weight}:0" for weight in weights]
        below.attrs["weight_names"] = [name.encode() for name in names]
        for name, value in zip(names, weights.values(), strict=True):
            dataset = below.create_dataset(name, value.shape, dtype=value.dtype)
            dataset[...] = value


def keras_model(path: Path) -> None:
    """As model.save("m.h5") does: configuration, weights, optimizer; layers without weights have empty groups."""
    norm = {"gamma": noise(8), "beta": noise(8), "moving_mean": noise(8), "moving_variance": noise(8)}
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = b"2.3.1"
        file.attrs["backend"] = b"tensorflow"
        file.attrs["model_config"] = json.dumps({"class_name": "Sequential", "config": {"name": "x" * 3000}}).encode()
        layers = {
            "conv": {"kernel": noise(3, 3, 1, 8), "bias": noise(8)},
            "bn": norm,
            "flatten": {},
            "fc": {"kernel": noise(200, 10), "bias": noise(10)},
        }
        keras_weights(file.create_group("model_weights"), layers)
        file.attrs["training_config"] = json.dumps({"loss": "mse"}).encode()
        state = file.create_group("optimizer_weights")
        moments = {f"training/Adam/{name}/{moment}:0": noise(200, 10) for name in ("fc/kernel",) for moment in "mv"}
        values = {"training/Adam/iter:0": np.int64(12), **moments}
        state.attrs["weight_names"] = [name.encode() for name in values]
        for name, value in values.items():
            dataset = state.create_dataset(name, value.shape, dtype=value.dtype)
            dataset[()] = value


def chainer_dataset(group: Any, key: str, value: Any) -> None:
    """As chainer.serializers.HDF5Serializer does: gzip level 4 for more than one element, an empty space for None."""
    if value is None:
        group.create_dataset(key, data=h5py.Empty("f"), compression=None)
        return
    array = np.asarray(value)
    group.create_dataset(key, data=array, compression=None if array.size <= 1 else 4)


def chainer_snapshot(path: Path) -> None:
    """As save_hdf5(path, trainer) does for a model with Adam and a StandardUpdater."""
    with h5py.File(path, "w") as file:
        updater = file.require_group("//updater")
        for key, value in (("current_position", 32), ("epoch", 1), ("is_new_epoch", False), ("order", np.arange(90))):
            chainer_dataset(updater.require_group("iterator:main"), key, value)
        chainer_dataset(updater.require_group("iterator:main"), "_previous_epoch_detail", 0.9)
        for key, value in (("t", 12), ("epoch", 1)):
            chainer_dataset(updater.require_group("optimizer:main"), key, value)
        for link, shapes in {"l1": {"W": (100, 64), "b": (100,)}, "bn": {"gamma": (100,), "beta": (100,)}}.items():
            for name, shape in shapes.items():
                chainer_dataset(updater.require_group(f"model:main/predictor/{link}"), name, noise(*shape))
                moments = updater.require_group(f"optimizer:main//predictor/{link}/{name}")
                for key, value in (("t", 12), ("m", noise(*shape)), ("v", noise(*shape))):
                    chainer_dataset(moments, key, value)
        norm = updater.require_group("model:main/predictor/bn")
        for key, value in (("avg_mean", noise(100)), ("avg_var", noise(100)), ("N", 7)):
            chainer_dataset(norm, key, value)
        chainer_dataset(updater.require_group("model:main/predictor/lazy"), "W", None)
        chainer_dataset(updater, "iteration", 12)


def attributes(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def visit(name: str, thing: Any) -> None:
        found[name] = {key: np.asarray(value).tolist() for key, value in thing.attrs.items()}

    with h5py.File(path) as file:
        visit("/", file)
        file.visititems(visit)
    return found


ROLES = {
    "keras": {
        "model_weights/conv/conv/kernel:0": "parameter",
        "model_weights/bn/bn/gamma:0": "parameter",
        "model_weights/bn/bn/moving_mean:0": "buffer",
        "model_weights/bn/bn/moving_variance:0": "buffer",
        "optimizer_weights/training/Adam/fc/kernel/v:0": "optimizer",
        "optimizer_weights/training/Adam/iter:0": "optimizer",
    },
    "chainer": {
        "updater/model:main/predictor/l1/W": "parameter",
        "updater/model:main/predictor/bn/avg_mean": "buffer",
        "updater/optimizer:main/predictor/l1/W/m": "optimizer",
        "updater/optimizer:main/t": "optimizer",
        "updater/iterator:main/_previous_epoch_detail": "other",
        "updater/iteration": "other",
    },
}
WEIGHTS = {"keras": "model_weights/fc/fc/kernel:0", "chainer": "updater/model:main/predictor/l1/W"}
MAKERS = {"keras": keras_model, "chainer": chainer_snapshot}


@pytest.fixture(params=MAKERS)
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def flips(name: str, *flat: int) -> FaultPlan:
    return plan_of([Target(name)], [(0, index, FLIP, 1 << 30, 0) for index in flat])


def test_every_dataset_has_its_path_and_role(library: str, tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    MAKERS[library](path)
    with open_checkpoint(path) as checkpoint:
        assert {tensor.name for tensor in checkpoint.tensors} == contents(path).keys() | (
            {"updater/model:main/predictor/lazy/W"} if library == "chainer" else set()
        )
        assert {name: checkpoint.tensor(name).role for name in ROLES[library]} == ROLES[library]
        assert checkpoint.notes == ()


def test_a_strike_changes_the_weight_alone_and_is_undone(library: str, tmp_path: Path) -> None:
    path, out = tmp_path / "m.h5", tmp_path / "out.h5"
    MAKERS[library](path)
    former, before = path.read_bytes(), contents(path)
    made = inject(path, out, flips(WEIGHTS[library], 0, 17, 1999))
    before[WEIGHTS[library]] = xored(before[WEIGHTS[library]], 4, "little", [0, 17, 1999], [1 << 30] * 3)
    assert contents(out) == before
    assert attributes(out) == attributes(path)
    assert verify(out, made.path, path).problems == ()
    inject(path, None, flips(WEIGHTS[library], 0, 17, 1999))
    assert contents(path) == before
    undo(path)
    undo(out)
    assert path.read_bytes() == out.read_bytes() == former


@pytest.mark.parametrize("to", ["pytorch", "safetensors", "hdf5"])
def test_a_conversion_keeps_names_and_numbers(library: str, to: str, tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    MAKERS[library](path)
    with open_checkpoint(path) as checkpoint:
        record = convert(checkpoint, tmp_path / "out", to, drop=library == "chainer")
        assert len(record["dropped"]) == (library == "chainer")  # what Chainer has not made yet
        with open_checkpoint(tmp_path / "out") as other:
            kept = [tensor for tensor in checkpoint.tensors if tensor.supported]
            assert [tensor.name for tensor in other.tensors] == [tensor.name for tensor in kept]
            for tensor in kept:
                theirs = other.tensor(tensor.name)
                np.testing.assert_array_equal(
                    np.concatenate(list(other.blocks(theirs))), np.concatenate(list(checkpoint.blocks(tensor)))
                )
