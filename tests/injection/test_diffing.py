"""diff: every differing element, whatever the formats; NaNs by their bits; tensors without a partner as rows."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from checkpoint_makers import drawn
from safetensors.numpy import save_file

from flipper.checkpoints import open_checkpoint
from flipper.injection import diff
from flipper.injection.diff import Summary, Unmatched, differences, rows
from flipper.injection.inject import inject

SAMPLES = Path(__file__).parent.parent.parent / "sample_checkpoints"


def rows_between(a: Path, b: Path) -> list[dict[str, Any]]:
    with open_checkpoint(a) as one, open_checkpoint(b) as other:
        return [row for found in differences(one, other)
                for row in ([found.row()] if isinstance(found, Unmatched) else rows(found))]  # fmt: skip


def summary_of(a: Path, b: Path) -> dict[str, Any]:
    summary = Summary()
    with open_checkpoint(a) as one, open_checkpoint(b) as other:
        for found in differences(one, other):
            summary.add(found)
    return summary.record()


@pytest.mark.parametrize("a", ["digits-cnn.pt", "digits-cnn-legacy.pt", "digits-cnn.h5", "digits-cnn.safetensors"])
@pytest.mark.parametrize("b", ["digits-cnn.pt", "digits-cnn.h5", "digits-cnn-dcp"])
def test_one_model_in_two_formats_is_equal(a: str, b: str) -> None:
    assert rows_between(SAMPLES / a, SAMPLES / b) == []
    assert summary_of(SAMPLES / a, SAMPLES / b)["equal"]


def test_one_seed_gives_the_same_faults_in_every_format_of_one_model() -> None:
    names = ("digits-cnn.pt", "digits-cnn.h5", "digits-cnn.safetensors", "digits-cnn-legacy.pt", "digits-cnn-dcp")
    plans = [list(drawn(SAMPLES / name, 5, count=100, bits="exponent,sign")) for name in names]
    assert len(plans[0]) == 100
    assert all(plan == plans[0] for plan in plans)


def test_faults_are_found_across_formats(tmp_path: Path) -> None:
    made = inject(SAMPLES / "digits-cnn.pt", tmp_path / "bad.pt", drawn(SAMPLES / "digits-cnn.pt", count=50))
    found = rows_between(SAMPLES / "digits-cnn.h5", tmp_path / "bad.pt")
    keys = ("tensor", "flat", "index", "dtype", "before", "after", "bits", "fields")
    assert [[row[key] for key in keys] for row in found] == [[row[key] for key in keys] for row in made.faults]
    assert [int(row["xor"], 16) for row in found] == [int(row["mask"], 16) for row in made.faults]


def test_nans_of_other_payload_differ_and_equal_ones_do_not(tmp_path: Path) -> None:
    def saved(name: str, *patterns: int) -> Path:
        values = np.frombuffer(struct.pack(f"<{len(patterns)}I", *patterns), np.float32)
        save_file({"w": values}, tmp_path / name)
        return tmp_path / name

    one = saved("a", 0x7FC00000, 0x7FC00001, 0x80000000, 0xFF800000)
    other = saved("b", 0x7FC00000, 0x7FC00002, 0x00000000, 0xFF800000)
    found = rows_between(one, other)
    assert [(row["flat"], row["xor"]) for row in found] == [(1, "0x00000003"), (2, "0x80000000")]
    assert np.isnan(found[0]["before_value"])
    assert found[1]["fields"] == ["sign"]


def test_tensors_without_a_partner_are_rows(tmp_path: Path) -> None:
    zeros = np.zeros(4, np.float32)
    save_file({"same": zeros, "gone": zeros, "type": zeros, "form": zeros}, tmp_path / "a")
    save_file({"same": zeros, "new": zeros, "type": zeros.astype("f8"), "form": zeros.reshape(2, 2)}, tmp_path / "b")
    found = [(row["kind"], row["tensor"], row["before"], row["after"]) for row in
             rows_between(tmp_path / "a", tmp_path / "b")]  # fmt: skip
    assert found == [
        ("shape", "form", "float32[4]", "float32[2,2]"),
        ("only-in-a", "gone", "float32[4]", None),
        ("only-in-b", "new", None, "float32[4]"),
        ("dtype", "type", "float32[4]", "float64[4]"),
    ]
    record = summary_of(tmp_path / "a", tmp_path / "b")
    assert not record["equal"]
    assert record["elements"] == record["bits"] == 0
    assert len(record["unmatched"]) == 4


def test_a_summary_counts_by_tensor_position_and_field(tmp_path: Path) -> None:
    one, other = np.zeros(6, "<u4"), np.zeros(6, "<u4")
    other[[0, 2, 5]] = 0x80000001, 0x40000000, 0x1
    for name, values in (("a", one), ("b", other)):
        save_file({"w": values.view("f4"), "v": np.zeros(2, "f4")}, tmp_path / name)
    record = summary_of(tmp_path / "a", tmp_path / "b")
    assert record["elements"] == 3
    assert record["bits"] == 4
    assert record["tensors"] == [{"tensor": "w", "elements": 3, "bits": 4}]
    assert record["positions"] == {"0": 2, "30": 1, "31": 1}
    assert record["fields"] == {"exponent": 1, "mantissa": 2, "sign": 1}


def test_differences_in_every_block_of_a_large_tensor_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked HDF5 against a transposed view in PyTorch: blocks are cut alike."""
    values = np.arange(700 * 900, dtype="f4").reshape(700, 900)
    torch.save({"w": torch.from_numpy(values.T.copy()).t()}, tmp_path / "a.pt")
    changed = values.copy()
    flat = [0, diff.BLOCK_ELEMENTS - 1, diff.BLOCK_ELEMENTS, 2 * diff.BLOCK_ELEMENTS, values.size - 1]
    changed.reshape(-1)[flat] += 0.5
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("w", data=changed, chunks=(64, 900))
    assert [row["flat"] for row in rows_between(tmp_path / "a.pt", tmp_path / "b.h5")] == flat


def test_tied_tensors_are_compared_once(tmp_path: Path) -> None:
    shared = torch.zeros(4)
    for name, value in (("a", 0.0), ("b", 1.0)):
        torch.save({"x": shared + value, "y": shared}, tmp_path / name)
        tied = shared.clone() + value
        torch.save({"x": tied, "y": tied}, tmp_path / f"tied-{name}")
    assert len(rows_between(tmp_path / "tied-a", tmp_path / "tied-b")) == 4
    assert len(rows_between(tmp_path / "a", tmp_path / "tied-b")) == 8


def test_of_two_tensors_with_one_name_the_first_is_struck_and_compared(tmp_path: Path) -> None:
    """Nested keys and a key with a dot may spell one name; the second tensor of that name is out of reach."""
    state = {"a": {"b": torch.zeros(4)}, "a.b": torch.zeros(4), "c": torch.zeros(4)}
    torch.save(state, tmp_path / "a.pt")
    inject(tmp_path / "a.pt", tmp_path / "b.pt", drawn(tmp_path / "a.pt", count=200))
    loaded = torch.load(tmp_path / "b.pt")
    assert loaded["a"]["b"].count_nonzero()
    assert not loaded["a.b"].count_nonzero()
    struck = {(row["tensor"], row["flat"]) for row in rows_between(tmp_path / "a.pt", tmp_path / "b.pt")}
    assert struck == {(name, flat) for name in ("a.b", "c") for flat in range(4)}
