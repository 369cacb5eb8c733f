"""The sample checkpoints are small, described, and resumed by `flipper train`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flipper.cli import cli
from flipper.training.run import train
from flipper.training.spec import Parallel, TrainSpec

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"


def test_every_sample_is_small_and_described() -> None:
    readme = (SAMPLES / "README.md").read_text(encoding="utf-8")
    for path in SAMPLES.rglob("*"):
        if path.is_file() and path.name != "README.md":
            assert path.stat().st_size < 300_000
            top = path.relative_to(SAMPLES).parts[0]
            assert f"`{top}`" in readme or f"`{top}/`" in readme or f"`{path.suffix}`" in readme


@pytest.mark.parametrize("recipe", ["digits-cnn", "digits-mlp"])
def test_training_goes_on_from_the_samples_alike_in_each_format(recipe: str) -> None:
    results = [
        train(TrainSpec(recipe, steps=36, resume=SAMPLES / f"{recipe}{suffix}"))
        for suffix in (".pt", ".safetensors", ".h5")
    ]
    assert {result.first_step for result in results} == {33}
    assert len({result.resume_digest for result in results}) == 1


@pytest.mark.parametrize("recipe", ["digits-cnn", "digits-mlp"])
def test_a_sample_holds_what_training_saves_today(recipe: str, tmp_path: Path) -> None:
    """Else it is old: scripts/make_samples would make another. Values differ between kinds of machines, so not they."""
    train(TrainSpec(recipe, steps=1, seed=2026, save=tmp_path))
    (saved,) = tmp_path.glob("*.safetensors")
    shapes = [
        {name: (tensor.dtype, tensor.shape) for name, tensor in load_file(path).items()}
        for path in (saved, SAMPLES / f"{recipe}.safetensors")
    ]
    assert shapes[0] == shapes[1]


def test_other_containers_of_the_same_state_resume_alike() -> None:
    digests = {
        train(TrainSpec("digits-cnn", steps=33, resume=SAMPLES / name)).resume_digest
        for name in ("digits-cnn.pt", "digits-cnn-legacy.pt", "digits-cnn-dcp")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("layout", ["ddp:2", "pipeline:2"])
def test_one_flipped_bit_does_the_same_to_training_from_each_format(tmp_path: Path, layout: str) -> None:
    """The main job: the same seed strikes the same bit of one model in three containers, and training differs."""
    digests = set()
    for suffix in (".pt", ".safetensors", ".h5"):
        clean, struck = SAMPLES / f"digits-cnn{suffix}", tmp_path / f"struck{suffix}"
        options = ["--layer", "fc", "--bits", "exponent-msb", "--seed", "3", "-q"]
        cli.main(["inject", str(clean), "-o", str(struck), *options], standalone_mode=False)
        digests.add(resumed(struck, layout))
    assert len(digests) == 1
    assert digests != {resumed(clean, layout)}


def resumed(path: Path, layout: str) -> str:
    return train(TrainSpec("digits-cnn", Parallel.parse(layout), steps=35, resume=path)).state_digest


def test_ties_and_views_are_what_they_are_called() -> None:
    """So that a reader is tested on the real thing."""
    state = torch.load(SAMPLES / "ties-and-views.pt")["state_dict"]
    assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert state["block.query"].untyped_storage().data_ptr() == state["block.key"].untyped_storage().data_ptr()
    assert not state["block.value"].is_contiguous()
    assert state["every_other"].stride() == (2,)
