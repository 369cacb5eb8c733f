"""The control: what it compares, and what it says when runs differ. That it holds: test_layouts.py."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from series import spec

from flipper.errors import UsageError
from flipper.training import control as control_module
from flipper.training.control import control
from flipper.training.run import TrainResult, train
from flipper.training.spec import TrainSpec


@pytest.mark.parametrize(("layout", "recipe"), [("pipeline:3", "digits-mlp"), ("single", "mnist5k-cnn")])
def test_more_stages_and_a_schedule_resume_exactly_too(layout: str, recipe: str) -> None:
    assert control(spec(recipe, layout, steps=4)).first_difference is None


def test_resuming_across_the_end_of_an_epoch_is_exact() -> None:
    assert control(spec("digits-mlp", "ddp:2", steps=50)).first_difference is None


def test_the_control_names_the_first_tensor_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of the saved bias is flipped between the stop and the resume."""

    def train_and_strike(spec: TrainSpec, *args: object, **options: object) -> TrainResult:
        result = train(spec)
        if spec.steps == 3:
            flip_one_bit(Path(result.files[-1]), "model.fc.bias")
        return result

    monkeypatch.setattr(control_module, "train", train_and_strike)
    verdict = control(spec("digits-cnn", steps=6))
    assert verdict.first_difference is not None
    assert verdict.first_difference.startswith("model.")
    assert verdict.record()["identical"] is False


def test_a_control_keeps_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--control keeps no checkpoints: leave out --save$"):
        control(spec("digits-mlp", steps=2, save=tmp_path))


def flip_one_bit(path: Path, name: str) -> None:
    """The highest mantissa bit of a float32 tensor's first element, by the rules of safetensors, without it."""
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    begin, _ = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    content[8 + length + begin + 2] ^= 0x40
    path.write_bytes(content)
