"""Damaged files that once brought out something else than a named reason: each kind that scripts/fuzz has found."""

import json
import pickle
import zipfile
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


DEEP = b")" + b"\x85" * 5000
"""Operations of a pickle stream that make a tuple nested too deep to print."""


def zipped(path: Path, stream: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", stream)
        archive.writestr("model/version", "3\n")
    return path


def test_the_key_of_a_storage_that_nests_deeper_than_python_can_print(tmp_path: Path) -> None:
    stream = b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\n" + DEEP + b"X\x03\0\0\0cpuK\x01tQ."
    assert refused(zipped(tmp_path / "model.pt", stream)).reason == "pickle"


def test_the_key_of_an_ordered_dict_that_nests_deeper_than_python_can_print(tmp_path: Path) -> None:
    stream = b"\x80\x02ccollections\nOrderedDict\n]" + DEEP + b"K\x01\x86a\x85R."
    with open_checkpoint(zipped(tmp_path / "model.pt", stream)) as checkpoint:
        assert checkpoint.tree() == {"tuple-0": 1}


def test_a_dcp_index_whose_name_nests_deeper_than_python_can_print(tmp_path: Path) -> None:
    def made(name: bytes, state: bytes) -> bytes:
        return b"c" + name + b"\n)\x81}" + state + b"b"

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    index = made(b"torch.distributed.checkpoint.metadata\nMetadataIndex", text("fqn") + DEEP + b"s")
    place = text("relative_path") + text("x.distcp") + b"s" + text("offset") + b"K\0s" + text("length") + b"K\x08s"
    info = made(b"torch.distributed.checkpoint.filesystem\n_StorageInfo", place)
    storage = text("storage_data") + b"}" + index + info + b"s" + b"s"
    whole = made(b"torch.distributed.checkpoint.metadata\nMetadata", text("state_dict_metadata") + b"}s" + storage)
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + whole + b".")
    (tmp_path / "x.distcp").write_bytes(bytes(8))
    error = refused(tmp_path)
    assert error.reason == "header"
    assert "name" in error.message


def test_an_index_that_names_a_file_too_long_for_any_filesystem(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "x" * 5000 + ".safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(tmp_path).reason == "missing-shard"
