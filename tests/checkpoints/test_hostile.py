"""Damaged files that once brought out something else than a named reason: each kind that scripts/fuzz has found."""

import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
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


def made(name: str, *members: bytes) -> bytes:
    """Operations that make an object of a class of torch.distributed.checkpoint and set its attributes."""
    return f"ctorch.distributed.checkpoint.{name}\n)".encode() + b"\x81}" + b"".join(members) + b"b"


def member(name: str, value: bytes) -> bytes:
    """Operations that set a key of a dict, or an attribute."""
    return text(name) + value + b"s"


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def dcp_directory(folder: Path, fqn: bytes, chunks: bytes) -> Path:
    """A checkpoint of one file whose .metadata has these operations in two places."""
    place = member("relative_path", text("x.distcp")) + member("offset", b"K\0") + member("length", b"K\x08")
    index = made("metadata\nMetadataIndex", member("fqn", fqn))
    stored = b"}" + index + made("filesystem\n_StorageInfo", place) + b"s"
    size = member("size", b"K\x02\x85")
    described = b"}" + member("a", made("metadata\nTensorStorageMetadata", size, member("chunks", chunks)))
    whole = made("metadata\nMetadata", member("state_dict_metadata", described), member("storage_data", stored))
    (folder / ".metadata").write_bytes(b"\x80\x02" + whole + b".")
    (folder / "x.distcp").write_bytes(bytes(8))
    return folder


def test_a_dcp_index_whose_name_nests_deeper_than_python_can_print(tmp_path: Path) -> None:
    error = refused(dcp_directory(tmp_path, DEEP, b"]"))
    assert error.reason == "header"
    assert "name" in error.message


def test_dcp_chunks_that_are_no_list(tmp_path: Path) -> None:
    error = refused(dcp_directory(tmp_path, text("a"), made("metadata\nChunkStorageMetadata")))
    assert error.reason == "header"
    assert "chunks" in error.message


def test_a_chunk_shorter_than_its_checksum_is_named_before_hdf5_dies_of_it(tmp_path: Path) -> None:
    """In a process of its own, since libhdf5 2.0 reads far beyond such a chunk."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        ones = np.ones((4, 4), np.float32)
        dataset = file.create_dataset("a", data=ones, chunks=(2, 4), compression=1, fletcher32=True)
        chunk = dataset.id.get_chunk_info(1)
    data = path.read_bytes()
    at = data.index(chunk.byte_offset.to_bytes(8, "little"))  # its key in the B-tree stands before: size, mask, origin
    key = at - 8 - 8 * 3
    assert int.from_bytes(data[key : key + 4], "little") == chunk.size
    path.write_bytes(data[:key] + bytes(4) + data[key + 4 :])
    code = "import sys; from flipper.checkpoints import open_checkpoint as o; print(*o(sys.argv[1]).problems())"
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "the chunk at (2, 0) has 0 bytes" in result.stdout
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.read_bits(checkpoint.tensor("a"), np.array([15]))
    assert caught.value.reason == "header"


def test_an_index_that_names_a_file_too_long_for_any_filesystem(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "x" * 5000 + ".safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(tmp_path).reason == "missing-shard"
