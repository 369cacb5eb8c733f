"""Damaged files that once brought out something else than a named reason: each kind that scripts/fuzz has found."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from flipper.checkpoints import open_checkpoint
from flipper.errors import CheckpointError
from flipper.faults.draw import draw
from flipper.faults.model import FaultModel
from flipper.injection.inject import inject
from flipper.injection.manifest import read_manifest

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


def refused(path: Path) -> CheckpointError:
    """The error that opening gives; its message is one line of bounded length."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1200
    return caught.value


def safetensors_file(path: Path, header: dict[str, Any], size: int = 8) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


def test_a_legacy_file_whose_protocol_nests_deeper_than_python_can_print(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    nested = b"\x80\x02)" + b"\x85" * 5000 + b"."
    rest = b"".join(pickle.dumps(value, 2) for value in ({}, {}, []))
    path.write_bytes(pickle.dumps(LEGACY_MAGIC, 2) + nested + rest)
    assert refused(path).reason == "header"


@pytest.mark.parametrize(
    "row",
    [
        {"dtype": "Q" * 100_000, "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["x" * 100_000], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
    ],
)
def test_messages_about_endless_names_stay_short(tmp_path: Path, row: dict[str, Any]) -> None:
    assert refused(safetensors_file(tmp_path / "x", {"a" * 100_000: row})).reason == "header"


def test_names_that_have_no_utf8_are_struck_and_recorded(tmp_path: Path) -> None:
    path = safetensors_file(tmp_path / "x", {"\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    with open_checkpoint(path) as checkpoint:
        made = inject(checkpoint, tmp_path / "out", draw(checkpoint, FaultModel(), seed=1))
    assert made.path is not None
    assert [row["tensor"] for row in read_manifest(made.path).faults] == ["\ud800"]
