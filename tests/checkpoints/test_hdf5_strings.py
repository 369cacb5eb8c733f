"""Attributes of variable length, read without libhdf5: what h5py wrote comes back, damage gives nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from flipper.checkpoints.hdf5_strings import vlen_string_attribute
from flipper.checkpoints.source import Source


@pytest.mark.parametrize("userblock", [0, 512])
@pytest.mark.parametrize("options", [{}, {"libver": "latest"}, {"libver": "latest", "track_order": True}])
def test_strings_that_h5py_wrote_come_back(userblock: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Of any length, many on one object, after others in the heap; other types and absent names give None."""
    texts = {
        "name": "fc",
        "empty": "",
        "umlaut": "größe",
        "long": "x" * 3000,
        **{f"n{i}": f"text {i}" for i in range(1 if options else 7)},  # more than eight would lie outside the header
    }
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=userblock, **options) as file:
        group = file.create_group("g")
        for name, text in texts.items():
            group.attrs[name] = text
        group.attrs["number"] = 7
        group.attrs["fixed"] = np.bytes_(b"fixed")
        group.attrs["two"] = ["a", "b"]
        address = h5py.h5o.get_info(group.id).addr
    source = Source(tmp_path / "a.h5")
    for name, text in texts.items():
        assert vlen_string_attribute(source, userblock, address, name.encode()) == text
    for name in (b"number", b"fixed", b"two", b"absent"):
        assert vlen_string_attribute(source, userblock, address, name) is None


@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_damage_ends_at_once_and_raises_nothing(version: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver=version) as file:
        file.create_group("g").attrs["name"] = "fc"
        address = h5py.h5o.get_info(file["g"].id).addr
    original = (tmp_path / "a.h5").read_bytes()
    random = np.random.default_rng(2)
    heap = original.index(b"GCOL")
    for _ in range(2000):
        data = bytearray(original)
        start = int(random.choice([address, heap]))
        for position in random.integers(start, min(start + 200, len(data)), 3).tolist():
            data[position] = int(random.choice([0, 255, int(random.integers(256))]))
        (tmp_path / "b.h5").write_bytes(data)
        found = vlen_string_attribute(Source(tmp_path / "b.h5"), 0, address, b"name")
        assert found is None or len(found) < 1 << 20
    assert vlen_string_attribute(Source(tmp_path / "a.h5"), 0, len(original), b"name") is None
