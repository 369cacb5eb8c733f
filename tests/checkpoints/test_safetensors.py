"""Headers by hand: what the safetensors library reads is read, and what breaks a rule is refused by it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from flipper.checkpoints import open_checkpoint
from flipper.errors import CheckpointError

ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = np.array([1.5, -2], "<f4").tobytes()


def written(folder: Path, header: object, data: bytes = DATA) -> Path:
    """A file of that header (text, or what becomes JSON) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


ODD = {
    "a key that the format doesn't have": {"a": {**ROW, "note": 1}},
    "no metadata": {"__metadata__": None, "a": ROW},
    "spaces before it": b" " * 9 + json.dumps({"a": ROW}).encode(),
    "a line break before it": b"\r\n\t" + json.dumps({"a": ROW}).encode(),
    "a line break behind it": json.dumps({"a": ROW}).encode() + b"\n",
    "64 axes": {"a": {**ROW, "shape": [1] * 63 + [2]}},
}


@pytest.mark.parametrize("header", ODD.values(), ids=ODD)
def test_odd_headers_that_the_library_reads_are_read(tmp_path, header):
    path = written(tmp_path, header)
    with safe_open(path, "numpy") as file:
        expected = file.get_tensor("a")
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint.tensor("a")
        assert tensor.shape == expected.shape
        read = checkpoint.read_bits(tensor, np.arange(2)).astype("<u4").view("<f4")
    assert read.tolist() == expected.reshape(-1).tolist()


BROKEN = {
    "metadata that is no text": ({"__metadata__": {"x": 1}, "a": ROW}, "__metadata__"),
    "a length that is no integer": ({"a": {**ROW, "shape": [2.0]}}, "natural numbers"),
    "offsets that are missing": ({"a": {"dtype": "F32", "shape": [2]}}, "data_offsets"),
    "a key of a tensor twice": (b'{"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', "occurs twice"),
    "half a byte": ({"a": {**ROW, "dtype": "F4", "shape": [15]}}, "15 numbers of 4 bits"),
    "NaN": (b'{"__metadata__":{"x":NaN},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "__metadata__"),
}


@pytest.mark.parametrize(("header", "told"), BROKEN.values(), ids=BROKEN)
def test_headers_that_the_library_refuses_are_refused(tmp_path, header, told):
    path = written(tmp_path, header)
    with pytest.raises(SafetensorError), safe_open(path, "numpy"):
        pass
    with pytest.raises(CheckpointError, match=told) as caught:
        open_checkpoint(path)
    assert caught.value.reason == "header"


def test_a_shape_of_a_million_axes_is_refused_before_it_is_multiplied(tmp_path):
    with pytest.raises(CheckpointError, match="the limit is 64"):
        open_checkpoint(written(tmp_path, {"a": {**ROW, "shape": [(1 << 62) - 1] * 1_000_000}}))
