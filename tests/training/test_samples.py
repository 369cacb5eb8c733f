"""The sample checkpoints are small, described, and resumed by `flipper train`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flipper.training.run import train
from flipper.training.spec import TrainSpec

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


def test_the_legacy_sample_resumes_as_the_new_one_does() -> None:
    digests = {
        train(TrainSpec("digits-cnn", steps=33, resume=SAMPLES / name)).state_digest
        for name in ("digits-cnn.pt", "digits-cnn-legacy.pt")
    }
    assert len(digests) == 1


def test_ties_and_views_are_what_they_are_called() -> None:
    """So that a reader is tested on the real thing."""
    state = torch.load(SAMPLES / "ties-and-views.pt")["state_dict"]
    assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert state["block.query"].untyped_storage().data_ptr() == state["block.key"].untyped_storage().data_ptr()
    assert not state["block.value"].is_contiguous()
    assert state["every_other"].stride() == (2,)
