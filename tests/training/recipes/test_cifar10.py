"""The CIFAR-10 recipes: the files they read and refuse, their models' sizes, their first losses."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import cifar_folder
import numpy as np
import pytest
import torch
from plain import first_losses, parameter_count

from flipper.errors import UsageError
from flipper.training import recipes
from flipper.training.recipes.cifar10_files import cifar10, read_batch

NAMES = ["cifar10-resnet20", "cifar10-alexnet", "cifar10-vgg"]

# As Python 2 and numpy 1 wrote it: two images, of a gradient; "labels" [7, 0].
PYTHON_2 = (
    b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x07K\x00eU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05"
    b"cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87R"
    b"q\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x18\x00\x00"
    + bytes(range(256)) * 24
    + b"tbu."
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_five_batches_are_to_train_on_and_the_sixth_to_test_with(tmp_path: Path, protocol: int) -> None:
    place = cifar_folder.write(tmp_path, protocol=protocol)
    data = cifar10(place)
    assert (data.train_features.shape, data.train_features.dtype) == ((320, 3, 32, 32), torch.uint8)
    assert (data.train_targets.shape, data.train_targets.dtype) == ((320,), torch.int64)
    for number in range(5):
        batch: Any = cifar_folder.batch(number)
        assert np.array_equal(data.train_features[64 * number :][:64].reshape(64, 3072).numpy(), batch[b"data"])
        assert data.train_targets[64 * number :][:64].tolist() == batch[b"labels"]
    assert np.array_equal(data.test_features.reshape(64, 3072).numpy(), cifar_folder.batch(5)[b"data"])
    assert torch.equal(cifar10(tmp_path).train_features, data.train_features)  # the folder that it is in


def test_a_file_of_python_2_and_numpy_1_is_read(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(PYTHON_2)
    images, labels = read_batch(tmp_path / "batch")
    assert np.array_equal(images.reshape(-1), np.arange(6144) % 256)
    assert labels.tolist() == [7, 0]


def test_an_array_in_column_order_is_read(tmp_path: Path) -> None:
    data = np.arange(2 * 3072).reshape(2, 3072).astype(np.uint8)
    for protocol in (2, 5):
        content = {b"data": np.asfortranarray(data), b"labels": [1, 2]}
        (tmp_path / "batch").write_bytes(pickle.dumps(content, protocol))
        assert np.array_equal(read_batch(tmp_path / "batch")[0].reshape(2, 3072), data)


class Malicious:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch struck",)


GOOD = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1, 2], "it holds no dict"),
        ({b"labels": [1, 2]}, "it has no 'data'"),
        ({b"data": GOOD}, "it has no 'labels'"),
        ({b"data": [1, 2], b"labels": [1, 2]}, "data is no numpy array"),
        ({b"data": GOOD.astype(np.float32), b"labels": [1, 2]}, "data is not uint8"),
        ({b"data": GOOD.astype(object), b"labels": [1, 2]}, "data is not uint8"),
        ({b"data": GOOD[:, :1024], b"labels": [1, 2]}, "data is not of shape [n, 3072]"),
        ({b"data": GOOD.reshape(-1), b"labels": [1, 2]}, "data is not of shape [n, 3072]"),
        ({b"data": GOOD[:0], b"labels": []}, "data is not of shape [n, 3072]"),
        ({b"data": GOOD, b"labels": [1]}, "labels is no list with a number for each image"),
        ({b"data": GOOD, b"labels": [1, 10]}, "a label is none of 0 to 9"),
        ({b"data": GOOD, b"labels": [1, "1"]}, "a label is none of 0 to 9"),
        ({b"data": Malicious(), b"labels": [1, 2]}, "data is no numpy array"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_and_nothing_in_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 5):
        path = tmp_path / "batch"
        path.write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(UsageError) as caught:
            read_batch(path)
        assert str(caught.value) == f"{path} is no batch of CIFAR-10's python version: {reason}"
        assert not (tmp_path / "struck").exists()


@pytest.mark.parametrize("length", [0, 1, 40, 3000])
def test_a_file_that_ends_too_early_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "batch"
    path.write_bytes(PYTHON_2[:length])
    with pytest.raises(UsageError, match="is no batch of CIFAR-10's python version: the file ends too early"):
        read_batch(path)


def test_a_file_that_is_no_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" * 100)
    with pytest.raises(UsageError, match=r"is no batch of CIFAR-10's python version: .*pickle"):
        read_batch(path)


def test_without_a_folder_the_error_says_what_belongs_where() -> None:
    with pytest.raises(UsageError) as caught:
        cifar10(None)
    assert str(caught.value) == (
        "CIFAR-10 comes with no package: give --data-dir DIR, the folder cifar-10-batches-py of CIFAR-10's python "
        "version (data_batch_1 to data_batch_5, test_batch) or the one it is in"
    )


def test_missing_files_are_named(tmp_path: Path) -> None:
    place = cifar_folder.write(tmp_path)
    (place / "data_batch_3").unlink()
    (place / "test_batch").unlink()
    with pytest.raises(
        UsageError, match=r"no CIFAR-10 in --data-dir .*: data_batch_3, test_batch missing; give the folder"
    ):
        cifar10(tmp_path)
    with pytest.raises(UsageError, match=r"data_batch_1, data_batch_2, .* missing"):
        cifar10(tmp_path / "nowhere")


@pytest.mark.parametrize(("name", "count"), list(zip(NAMES, [269_722, 2_472_266, 9_231_114], strict=True)))
def test_the_models_are_of_the_size_that_the_literature_gives(name: str, count: int) -> None:
    """0.27 M (He et al., table 6), 2.47 M and 9.23 M (as published for the usual CIFAR forms)."""
    recipe = recipes.get(name)
    assert parameter_count(recipe) == count
    assert recipe.model()(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 10)


def test_resnet20_has_19_convolutions_and_a_linear_layer_and_halves_the_image_twice() -> None:
    model = recipes.get("cifar10-resnet20").model()
    weights = [parameter for name, parameter in model.named_parameters() if parameter.dim() in (2, 4)]
    assert len(weights) == 20
    assert not [name for name, _ in model.named_parameters() if "conv" in name and name.endswith("bias")]
    x = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    shapes = []
    for child in model.children():
        x = child(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(16, 32, 32)] * 4 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3 + [(10,)]


def test_a_shortcut_takes_every_other_pixel_and_zeros_for_new_channels() -> None:
    """With the last BatchNorm's scale at 0 a block returns its shortcut."""
    block: Any = recipes.get("cifar10-resnet20").model().get_submodule("block4")
    torch.nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 16, 32, 32)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_images_are_normalised_as_is_usual() -> None:
    model = recipes.get("cifar10-alexnet").model()
    images = torch.arange(3072).reshape(1, 3, 32, 32).to(torch.uint8)
    mean = np.array([0.4914, 0.4822, 0.4465]).reshape(3, 1, 1)
    deviation = np.array([0.2470, 0.2435, 0.2616]).reshape(3, 1, 1)
    expected = (images.numpy() / 255 - mean) / deviation
    np.testing.assert_allclose(model.get_submodule("normalise")(images).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_learning_rate_falls_to_a_tenth_at_half_and_three_quarters_of_64_000_steps(name: str) -> None:
    recipe = recipes.get(name)
    optimizer = recipe.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert recipe.schedule
    schedule: Any = recipe.schedule(optimizer)
    factor = schedule.lr_lambdas[0]
    assert [factor(step) for step in (0, 31_999)] == [1, 1]
    assert [factor(step) for step in (32_000, 47_999, 48_000, 64_000)] == pytest.approx([0.1, 0.1, 0.01, 0.01])


FIRST = {
    "cifar10-resnet20": [2.53961, 2.19296, 2.81301],
    "cifar10-alexnet": [2.31473, 2.30854, 2.30297],
    "cifar10-vgg": [2.58659, 2.42117, 1.83588],
}


@pytest.mark.parametrize("name", NAMES)
def test_first_losses(tmp_path: Path, name: str) -> None:
    recipe = replace(recipes.get(name), batch_size=32)
    cifar_folder.write(tmp_path)
    assert first_losses(recipe, 3, tmp_path) == pytest.approx(FIRST[name], rel=2e-3)
