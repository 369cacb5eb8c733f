"""Resuming is exact: stopped, saved, and gone on with in fresh processes, a run ends in the very same state."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from flipper.training import control as control_module
from flipper.training.control import control
from flipper.training.run import TrainResult, train
from flipper.training.spec import SUFFIXES, Parallel, TrainSpec


def spec(layout: str, checkpoint_format: str = "safetensors", recipe: str = "digits-cnn", steps: int = 6) -> TrainSpec:
    return TrainSpec(
        recipe, Parallel.parse(layout), steps=steps, seed=3, checkpoint_format=checkpoint_format, timeout=60
    )


@pytest.mark.parametrize("checkpoint_format", SUFFIXES)
@pytest.mark.parametrize("layout", ["single", "ddp:2", "pipeline:2"])
def test_a_resumed_run_equals_the_uninterrupted_one(layout: str, checkpoint_format: str) -> None:
    """BatchNorm, dropout and Adam's state included: the recipe has all three."""
    verdict = control(spec(layout, checkpoint_format))
    assert verdict.first_difference is None
    assert verdict.resumed.first_step == 3
    assert verdict.resumed.state_digest == verdict.uninterrupted.state_digest
    assert verdict.resumed.resume_digest == verdict.uninterrupted.resume_digest


@pytest.mark.parametrize(("layout", "recipe"), [("ddp:3", "digits-cnn"), ("pipeline:3", "digits-mlp")])
def test_more_ranks_resume_exactly_too(layout: str, recipe: str) -> None:
    """Three ranks are where sums that depend on DDP's buckets would differ; their shares of a batch are unequal."""
    assert control(spec(layout, recipe=recipe)).first_difference is None


def test_resuming_across_the_end_of_an_epoch_is_exact() -> None:
    assert control(spec("ddp:2", recipe="digits-mlp", steps=50)).first_difference is None


def test_the_control_names_the_first_tensor_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of the saved bias is flipped between the stop and the resume."""

    def train_and_strike(spec: TrainSpec, *args: object, **options: object) -> TrainResult:
        result = train(spec)
        if spec.steps == 3:
            flip_one_bit(Path(result.files[-1]), "model.fc.bias")
        return result

    monkeypatch.setattr(control_module, "train", train_and_strike)
    verdict = control(spec("single"))
    assert verdict.first_difference is not None
    assert verdict.first_difference.startswith("model.")
    assert verdict.record()["identical"] is False


def flip_one_bit(path: Path, name: str) -> None:
    """The highest mantissa bit of a float32 tensor's first element, by the rules of safetensors, without it."""
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    begin, _ = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    content[8 + length + begin + 2] ^= 0x40
    path.write_bytes(content)
