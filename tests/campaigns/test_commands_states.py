"""States: outputs are the same where their tensors are, whatever the container; measures against numpy's own."""

from __future__ import annotations

import math
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from flipper.campaigns.states import state_of
from flipper.errors import CheckpointError, UsageError


def arrays(seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "fc.weight": random.normal(size=(300, 1000)).astype("f4"),
        "fc.bias": random.normal(size=7).astype("f8"),
        "steps": np.arange(5),
        "optimizer.fc.weight.exp_avg": random.normal(size=3).astype("f4"),
    }


def saved(path: Path, values: dict[str, np.ndarray]) -> Path:
    save_file(values, path)
    return path


def test_the_same_tensors_in_other_containers_are_the_same_state(tmp_path: Path) -> None:
    values = arrays()
    digests = {state_of(saved(tmp_path / "a.safetensors", values)).digest}
    save_file(values, tmp_path / "b.safetensors", metadata={"time": "now"})
    torch.save({name: torch.from_numpy(value) for name, value in reversed(values.items())}, tmp_path / "c.pt")
    torch.save({"epoch": 7, **{n: torch.from_numpy(v) for n, v in values.items()}}, tmp_path / "d.pt")
    for name in ("b.safetensors", "c.pt", "d.pt"):
        digests.add(state_of(tmp_path / name).digest)
    assert len(digests) == 1
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["fc/weight"] = values["fc.weight"]
    with h5py.File(tmp_path / "chunked.h5", "w") as file:
        file.create_dataset("fc/weight", data=values["fc.weight"], chunks=(7, 100), compression="gzip")
    assert state_of(tmp_path / "plain.h5").digest == state_of(tmp_path / "chunked.h5").digest


def test_any_bit_name_shape_or_dtype_makes_another_state(tmp_path: Path) -> None:
    values = arrays()
    digests = {state_of(saved(tmp_path / "0.safetensors", values)).digest}
    changed = {name: value.copy() for name, value in values.items()}
    changed["fc.weight"].view("u4")[299, 999] ^= 1
    integer = {**values, "steps": values["steps"] + 1}
    renamed = {**values, "other": values["steps"]}
    del renamed["steps"]
    shaped = {**values, "fc.weight": values["fc.weight"].reshape(1000, 300)}
    typed = {**values, "fc.bias": values["fc.bias"].view("i8")}
    zero = {**values, "fc.bias": values["fc.bias"] * 0}
    minus = {**values, "fc.bias": values["fc.bias"] * 0 * -1}
    for number, other in enumerate((changed, integer, renamed, shaped, typed, zero, minus), 1):
        digests.add(state_of(saved(tmp_path / f"{number}.safetensors", other)).digest)
    assert len(digests) == 8


def test_measures_are_numpys(tmp_path: Path) -> None:
    values, usual = arrays(1), arrays(2)
    reference = saved(tmp_path / "reference.safetensors", usual)
    state = state_of(saved(tmp_path / "a.safetensors", values), reference)
    model = ("fc.weight", "fc.bias")
    apart = math.sqrt(sum(((values[n].astype("f8") - usual[n]) ** 2).sum() for n in model))
    whole = math.sqrt(sum((usual[n].astype("f8") ** 2).sum() for n in model))
    assert state.distance == pytest.approx(apart / whole, rel=1e-12)
    assert state.max_abs_parameter == max(np.abs(values[n]).max() for n in model)
    assert state.nonfinite == 0
    assert state_of(reference, reference).distance == 0
    assert state_of(reference).distance is None


def test_elements_that_are_not_finite_are_counted_and_left_out_of_the_largest(tmp_path: Path) -> None:
    values = arrays()
    reference = saved(tmp_path / "reference.safetensors", values)
    values["fc.weight"][0, :3] = np.nan, np.inf, -np.inf
    values["optimizer.fc.weight.exp_avg"][1] = np.nan
    values["fc.bias"][2] = -1e300
    state = state_of(saved(tmp_path / "a.safetensors", values), reference)
    assert state.nonfinite == 4
    assert state.max_abs_parameter == 1e300
    assert math.isnan(state.distance or 0)
    values["fc.weight"][0, :3] = 0
    assert state_of(saved(tmp_path / "b.safetensors", values), reference).distance == math.inf


def test_states_that_do_not_match_have_no_distance(tmp_path: Path) -> None:
    values = arrays()
    reference = saved(tmp_path / "reference.safetensors", values)
    more = {**values, "extra.weight": np.ones(3, "f4")}
    assert state_of(saved(tmp_path / "more.safetensors", more), reference).distance is None
    optimizer = {**values, "optimizer.more": np.ones(3, "f4")}
    assert state_of(saved(tmp_path / "optimizer.safetensors", optimizer), reference).distance == 0
    half = {**values, "fc.weight": values["fc.weight"].astype("f2")}
    assert state_of(saved(tmp_path / "half.safetensors", half), reference).distance is None


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        state_of(tmp_path / "gone")
    (tmp_path / "text").write_text("text")
    with pytest.raises(CheckpointError):
        state_of(tmp_path / "text")
