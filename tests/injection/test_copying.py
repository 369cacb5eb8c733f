"""The copy engine with each of its ways forced, and the patchers against changing one byte at a time."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoint_makers import drawn, safetensors_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flipper.checkpoints import elements
from flipper.injection import copying, patching
from flipper.injection.copying import copy, link_or_copy
from flipper.injection.inject import inject

SIZES = (0, 1, 4095, 4096, 1 << 20, (1 << 22) + 7)


def refusing(number: int):
    def way(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return way


def few(count: int):
    """Moves a few bytes a call, as signals and network filesystems do."""
    real = copying._read_write
    return lambda reader, writer, offset, wanted: real(reader, writer, offset, min(wanted, count))


WAYS = {
    "as it is": {},
    "no clone": {"clone": lambda *_: False},
    "copy_file_range across filesystems": {"_copy_file_range": refusing(errno.EXDEV)},
    "copy_file_range not there": {"_copy_file_range": refusing(errno.ENOSYS)},
    "copy_file_range says 0": {"_copy_file_range": lambda *_: 0},
    "sendfile not for files": {"_copy_file_range": lambda *_: 0, "_sendfile": refusing(errno.EINVAL)},
    "sendfile says 0": {"_copy_file_range": refusing(errno.EOPNOTSUPP), "_sendfile": lambda *_: 0},
    "short moves": {"_copy_file_range": few(100_001), "_sendfile": few(50_021)},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(copying, "clone", lambda *_: False)
    for name, function in WAYS[request.param].items():
        monkeypatch.setattr(copying, name, function)
    return request.param


def test_every_way_copies_every_byte_and_the_mode(way: str, tmp_path: Path) -> None:
    for size in SIZES:
        source, target = tmp_path / f"source-{size}", tmp_path / f"target-{size}"
        source.write_bytes(np.random.default_rng(size).bytes(size))
        source.chmod(0o440)
        target.touch()
        copy(source, target)
        assert target.read_bytes() == source.read_bytes()
        assert target.stat().st_mode & 0o777 == 0o440


def test_a_way_that_gives_up_half_way_is_followed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []

    def half(reader: int, writer: int, offset: int, count: int) -> int:
        if moved:
            raise OSError(errno.EXDEV, "")
        moved.append(1)
        return copying._read_write(reader, writer, offset, 1000)

    monkeypatch.setattr(copying, "clone", lambda *_: False)
    monkeypatch.setattr(copying, "_copy_file_range", half)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(5000))
    target.touch()
    copy(source, target)
    assert moved
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT])
def test_errors_of_the_disk_are_no_reason_for_another_way(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "clone", lambda *_: False)
    monkeypatch.setattr(copying, "_copy_file_range", refusing(number))
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"x" * 100)
    target.touch()
    with pytest.raises(OSError, match=os.strerror(number)):
        copy(source, target)


def test_a_source_that_is_cut_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a copy that is shorter than its source was."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"x" * 100)
    target.touch()

    def cut(*_: object) -> bool:
        os.truncate(source, 60)
        return False

    size = os.stat(source)
    monkeypatch.setattr(copying, "clone", cut)
    monkeypatch.setattr(copying.os, "fstat", lambda _: size)
    with pytest.raises(OSError, match="ended at byte 60 of 100"):
        copy(source, target)


def test_a_refused_clone_is_told_from_a_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY, errno.EINVAL, errno.ENOSYS):
        monkeypatch.setattr(copying.fcntl, "ioctl", refusing(number))
        assert not copying.clone(0, 1)
    monkeypatch.setattr(copying.fcntl, "ioctl", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        copying.clone(0, 1)


def test_unstruck_shards_are_linked_or_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"abc")
    monkeypatch.setattr(copying, "clone", lambda *_: False)
    link_or_copy(source, tmp_path / "linked")
    assert (tmp_path / "linked").stat().st_ino == source.stat().st_ino
    monkeypatch.setattr(copying.os, "link", refusing(errno.EXDEV))
    link_or_copy(source, tmp_path / "copied")
    assert (tmp_path / "copied").stat().st_ino != source.stat().st_ino
    assert (tmp_path / "copied").read_bytes() == b"abc"


def copied_whole(reader: int, writer: int) -> bool:
    """What a filesystem that shares blocks does, as far as the bytes tell."""
    os.pwrite(writer, os.pread(reader, os.fstat(reader).st_size, 0), 0)
    return True


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_blocks_of_any_size_give_the_bytes_of_one_fault_at_a_time(
    data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = data.draw(st.integers(1, 300))
    faults = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 255)), max_size=60))
    together = data.draw(st.sampled_from([1, 7, 64]))
    monkeypatch.setattr(patching, "BLOCK", together)
    monkeypatch.setattr(patching, "PIECE", together)
    monkeypatch.setattr(patching, "DENSE", data.draw(st.sampled_from([0, 1000])))  # altered while or after it is copied
    shared = data.draw(st.booleans())
    monkeypatch.setattr(copying, "clone", copied_whole if shared else lambda *_: False)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(np.random.default_rng(size).bytes(size))
    expected = bytearray(source.read_bytes())
    for offset, mask in faults:  # several in one byte too
        expected[offset] ^= mask
    offsets = np.array([offset for offset, _ in faults], np.int64)
    masks = np.array([mask for _, mask in faults], np.uint8)
    combined = elements.combine(offsets, masks)
    assert np.all(np.diff(combined[0]) > 0)
    target.write_bytes(b"")
    patching.copy_patched(source, target, *combined)
    assert target.read_bytes() == expected
    patching.patch(target, *combined)
    assert target.read_bytes() == source.read_bytes()


def test_elements_across_the_edges_of_blocks(tmp_path: Path) -> None:
    """float64 at odd places, one across 1 MiB and one across 4 MiB, in a copy and in place."""
    import json
    import struct

    count = (5 << 20) // 8
    header = json.dumps({"w": {"dtype": "F64", "shape": [count], "data_offsets": [0, 8 * count]}}).encode()
    header = header.ljust(len(header) + (5 - len(header)) % 8)  # data begins at byte 8 + 5 modulo 8
    start = 8 + len(header)
    assert start % 8 == 5
    source = tmp_path / "odd.safetensors"
    source.write_bytes(struct.pack("<Q", len(header)) + header + np.random.default_rng(0).bytes(8 * count))
    from checkpoint_makers import listed

    rows = []
    for edge in (1 << 20, 4 << 20, (4 << 20) + 4096):
        flat = (edge - start) // 8
        assert start + 8 * flat < edge < start + 8 * flat + 8
        rows += [(flat - 1, "flip", 1 << 63, 0), (flat, "flip", (1 << 64) - 1, 0), (flat + 1, "flip", 1, 0)]
    expected = bytearray(source.read_bytes())
    for flat, _, mask, _ in rows:
        at = start + 8 * flat
        (value,) = struct.unpack_from("<Q", expected, at)
        struct.pack_into("<Q", expected, at, value ^ mask)
    out = tmp_path / "out"
    inject(source, out, listed("w", *rows))
    assert out.read_bytes() == expected
    inject(source, None, listed("w", *rows))
    assert source.read_bytes() == expected


def test_a_read_only_source_gives_a_read_only_copy_with_the_faults(tmp_path: Path) -> None:
    source = safetensors_file(tmp_path)
    source.chmod(0o444)
    for name, count in (("few", 3), ("many", 5000)):
        made = inject(source, tmp_path / name, drawn(source, count=count))
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o444
        assert made.table.bits_changed == count
