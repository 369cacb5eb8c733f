"""Filtered HDF5 chunks: struck elements change alone, whatever the filter, and the file hardly grows."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_tools import contents, strike, xored

from flipper.checkpoints import hdf5_boxed
from flipper.checkpoints.formats import open_checkpoint
from flipper.checkpoints.hdf5_boxed import BoxReader

H5PY: dict[str, dict[str, Any]] = {
    "gzip": {"compression": "gzip"},
    "gzip-9-shuffle": {"compression": "gzip", "compression_opts": 9, "shuffle": True},
    "gzip-fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "szip": {"compression": "szip"},
    "shuffle": {"shuffle": True},
    "fletcher32": {"fletcher32": True},
    "scaleoffset": {"scaleoffset": 3},
}
PLUGINS = {
    "Bitshuffle": {}, "Blosc": {}, "Blosc2": {}, "BZip2": {}, "LZ4": {}, "Zstd": {}, "Zfp": {}, "FciDecomp": {},
    "SZ": {"absolute": 0.001}, "SZ3": {"absolute": 0.001}, "Sperr": {"rate": 8},
}  # fmt: skip
INTEGERS_ONLY = {"FciDecomp"}


def options_of(name: str) -> Any:
    """create_dataset's options for a filter; skips the test when it is not installed."""
    if name in H5PY:
        return H5PY[name]
    plugins = pytest.importorskip("hdf5plugin")
    if not hasattr(plugins, name):
        pytest.skip(f"this hdf5plugin has no {name}")
    return getattr(plugins, name)(**PLUGINS[name])


def write(path: Path, options: Any, dtype: str = "f4") -> Path:
    """A file with one filtered dataset `g/w`: noise in some chunks, ones in others, and a plain dataset behind it."""
    data = np.random.default_rng(3).normal(size=(50, 70)) * 100
    data[:30, :40] = 1
    with h5py.File(path, "w") as file:
        file.create_dataset("g/w", data=data.astype(dtype), chunks=(16, 32), **options)
        file["other"] = data
    return path


@pytest.mark.parametrize("name", [*H5PY, *PLUGINS])
def test_a_strike_changes_the_elements_asked_for_alone(name: str, tmp_path: Path) -> None:
    """Also under lossy filters, whose struck chunk is stored without them. The growth is that of a few chunks."""
    dtype = "u1" if name in INTEGERS_ONLY else "f4"
    path = write(tmp_path / "a.h5", options_of(name), dtype)
    before = contents(path)
    itemsize = np.dtype(dtype).itemsize
    flat, xor = [0, 5, 78, 2000, 3499], [1, 1 << 8 * itemsize - 2, 1 << 8 * itemsize - 1, 7, 1 << 4]
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint.tensor("g/w")
        assert tensor.place.storage == "filtered"
        expected = np.frombuffer(before["g/w"], f"<u{itemsize}").astype(np.uint64)
        everything = np.arange(tensor.elements, dtype=np.int64)
        np.testing.assert_array_equal(checkpoint.read_bits(tensor, everything), expected)
        np.testing.assert_array_equal(np.concatenate(list(checkpoint.blocks(tensor, 512))), expected)
        strike(checkpoint, "g/w", flat, xor, tmp_path / "b.h5")
        assert list(checkpoint.problems()) == []
    before["g/w"] = xored(before["g/w"], itemsize, "little", flat, xor)
    assert contents(tmp_path / "b.h5") == before
    growth = (tmp_path / "b.h5").stat().st_size - path.stat().st_size
    assert 0 <= growth <= 4 * (16 * 32 * itemsize + 512)


@pytest.mark.parametrize("name", ["gzip", "gzip-fletcher32", "fletcher32", "shuffle"])
def test_a_chunk_that_fits_keeps_its_place(name: str, tmp_path: Path) -> None:
    """A low mantissa bit of noise: no byte outside the chunk changes, so the file's index stays as it is."""
    path = write(tmp_path / "a.h5", H5PY[name])
    with h5py.File(path) as file:
        info = file["g/w"].id.get_chunk_info_by_coord((32, 32))
    with open_checkpoint(path) as checkpoint:
        strike(checkpoint, "g/w", [35 * 70 + 40], [1 << 3], tmp_path / "b.h5")
    old, new = path.read_bytes(), (tmp_path / "b.h5").read_bytes()
    assert len(old) == len(new)
    changed = [index for index in range(len(old)) if old[index] != new[index]]
    assert changed
    assert info.byte_offset <= changed[0] <= changed[-1] < info.byte_offset + info.size


def test_a_strike_undone_by_a_strike_gives_the_same_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", H5PY["gzip-9-shuffle"])
    for source, target in (("a.h5", "b.h5"), ("b.h5", "c.h5")):
        with open_checkpoint(tmp_path / source) as checkpoint:
            strike(checkpoint, "g/w", [0, 3499], [1 << 30, 1], tmp_path / target)
    assert contents(tmp_path / "c.h5") == contents(path)


def test_a_chunk_stored_without_its_filters_stays_so(tmp_path: Path) -> None:
    """Its filter mask says that they were skipped; another chunk of the dataset is filtered."""
    path = write(tmp_path / "a.h5", H5PY["gzip-fletcher32"])
    raw = np.random.default_rng(4).normal(size=(16, 32)).astype("f4")
    with h5py.File(path, "r+") as file:
        file["g/w"].id.write_direct_chunk((16, 0), raw.tobytes(), 0b111)
    before = contents(path)
    with open_checkpoint(path) as checkpoint:
        strike(checkpoint, "g/w", [70 * 16, 70 * 17 + 31, 5], [1, 1 << 31, 2], tmp_path / "b.h5")
    before["g/w"] = xored(before["g/w"], 4, "little", [70 * 16, 70 * 17 + 31, 5], [1, 1 << 31, 2])
    assert contents(tmp_path / "b.h5") == before
    with h5py.File(tmp_path / "b.h5") as file:
        assert file["g/w"].id.get_chunk_info_by_coord((16, 0)).filter_mask == 0b111


def test_a_chunk_that_changes_its_filters_and_not_its_size(tmp_path: Path) -> None:
    """HDF5 would keep the old filter mask, and read the new bytes by it. Some of these chunks, which a strike leaves
    unfiltered as their filter is lossy, have exactly the size of unfiltered ones."""
    data = (np.random.default_rng(1).normal(size=(400, 5)) * 50).astype("f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("w", data=data, chunks=(4, 5), scaleoffset=4, shuffle=True, compression="gzip")
        sizes = [file["w"].id.get_chunk_info(index).size for index in range(100)]
    assert 80 in sizes
    before = contents(tmp_path / "a.h5")
    flat = list(range(0, 2000, 20))
    with open_checkpoint(tmp_path / "a.h5") as checkpoint:
        strike(checkpoint, "w", flat, [1 << 30] * 100, tmp_path / "b.h5")
    before["w"] = xored(before["w"], 4, "little", flat, [1 << 30] * 100)
    assert contents(tmp_path / "b.h5") == before


def test_work_follows_the_chunks_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the chunk at a place takes HDF5 a walk over all chunks, so it isn't asked for each of them."""
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_dataset("w", data=np.ones(20_000, "f4"), chunks=(2,), compression="gzip")
    before = contents(tmp_path / "a.h5")
    walks = []
    walk = hdf5_boxed.stored_chunks
    monkeypatch.setattr(hdf5_boxed, "stored_chunks", lambda dataset: walks.append(1) or walk(dataset))
    flat = list(range(0, 20_000, 400))
    with open_checkpoint(tmp_path / "a.h5") as checkpoint:
        strike(checkpoint, "w", flat, [1] * 50, tmp_path / "b.h5")
        assert len(walks) == 1
        assert list(checkpoint.problems()) == []
        assert len(walks) == 2
        assert sum(map(len, checkpoint.blocks(checkpoint.tensor("w")))) == 20_000
        assert len(walks) == 3
    before["w"] = xored(before["w"], 4, "little", flat, [1] * 50)
    assert contents(tmp_path / "b.h5") == before


def test_what_lies_past_the_edge_of_the_array_survives(tmp_path: Path) -> None:
    """An edge chunk's padding shows again when the dataset grows."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        options = {"chunks": (4,), "maxshape": (None,), "compression": "gzip", "fillvalue": 9}
        file.create_dataset("w", (6,), "f4", **options)[...] = 1
    with open_checkpoint(tmp_path / "a.h5") as checkpoint:
        strike(checkpoint, "w", [5], [1 << 31], tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        file["w"].resize((8,))
        assert file["w"][...].tolist() == [1, 1, 1, 1, 1, -1, 9, 9]


def test_options_that_do_not_fit_the_chunks_are_not_given_to_hdf5(tmp_path: Path) -> None:
    """libhdf5 2.0 crashes when scale-offset claims more elements than a chunk has."""
    path = write(tmp_path / "a.h5", H5PY["scaleoffset"])
    data = path.read_bytes()
    options = struct.pack("<5I", 0, 3, 16 * 32, 1, 4)
    assert data.count(options) == 1
    path.write_bytes(data.replace(options, struct.pack("<5I", 0, 3, 0xFF000000, 1, 4)))
    with open_checkpoint(path) as checkpoint:
        assert "don't fit its chunks" in str(checkpoint.tensor("g/w").place.reason)


def hdf5_library() -> Any:
    """The HDF5 library that h5py has loaded, for what h5py doesn't offer; None where it can't be found."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    names = [line.split()[-1] for line in lines if "/libhdf5-" in line or "/libhdf5.so" in line]
    return ctypes.CDLL(names[0]) if names else None


def test_edge_chunks_that_hdf5_left_unfiltered_are_struck_too(tmp_path: Path) -> None:
    """H5Pset_chunk_opts(DONT_FILTER_PARTIAL_CHUNKS): neither chunk nor h5py tells which they are."""
    library = hdf5_library()
    if library is None:
        pytest.skip("the HDF5 library is nowhere to be found")
    data = np.random.default_rng(3).normal(size=(10, 10)).astype("f4")
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((4, 4))
        properties.set_deflate(4)
        assert library.H5Pset_chunk_opts(ctypes.c_int64(properties.id), 2) >= 0
        made = h5py.h5d.create(file.id, b"w", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((10, 10)), properties)
        h5py.Dataset(made)[...] = data
    before = contents(tmp_path / "a.h5")
    with open_checkpoint(tmp_path / "a.h5") as checkpoint:
        strike(checkpoint, "w", [0, 99], [1 << 30, 1 << 31], tmp_path / "b.h5")
    before["w"] = xored(before["w"], 4, "little", [0, 99], [1 << 30, 1 << 31])
    assert contents(tmp_path / "b.h5") == before


def test_many_strikes_open_the_file_once_and_grow_it_little(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", H5PY["gzip"])
    flat = list(range(0, 3500, 7))
    before = contents(path)
    with open_checkpoint(path) as checkpoint:
        strike(checkpoint, "g/w", flat, [1 << 22] * len(flat), tmp_path / "b.h5")
    before["g/w"] = xored(before["g/w"], 4, "little", flat, [1 << 22] * len(flat))
    assert contents(tmp_path / "b.h5") == before
    assert (tmp_path / "b.h5").stat().st_size < 1.5 * path.stat().st_size


def test_streaming_decodes_every_chunk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads bands that end where chunks do, though each block of elements lies across several chunks."""
    path = write(tmp_path / "a.h5", H5PY["gzip"])
    bands: list[tuple[int, int]] = []
    rows = BoxReader.rows
    monkeypatch.setattr(BoxReader, "rows", lambda self, *band: bands.append(band) or rows(self, *band))
    monkeypatch.setattr(hdf5_boxed, "BAND", 1)
    with open_checkpoint(path) as checkpoint:
        blocks = list(checkpoint.blocks(checkpoint.tensor("g/w"), 64))
    assert bands == [(0, 16), (16, 32), (32, 48), (48, 50)]
    assert {len(block) for block in blocks[:-1]} == {64}


def test_streaming_huge_rows_of_chunks_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.h5", H5PY["gzip"])
    expected = np.frombuffer(contents(path)["g/w"], "<u4").astype(np.uint64)
    monkeypatch.setattr(hdf5_boxed, "CACHE", 3000)
    with open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(np.concatenate(list(checkpoint.blocks(checkpoint.tensor("g/w"), 64))), expected)
