"""The zip directory against zipfile, and archives that break a rule of the format."""

from __future__ import annotations

import io
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from flipper.checkpoints.archive_crcs import crc_masks, problems
from flipper.checkpoints.archives import Archive, mentions
from flipper.checkpoints.inflate import inflated
from flipper.checkpoints.source import Source
from flipper.errors import CheckpointError

CONTENT = {"a/x": b"abc" * 50, "a/empty": b"", "b": bytes(range(256)) * 9}


class Unseekable(io.RawIOBase):
    """A stream to which zipfile writes data descriptors, since it can't go back."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.data += bytes(data)
        return len(data)


def zipped(streamed: bool = False, method: int = zipfile.ZIP_STORED, wide: bool = False) -> bytes:
    target = Unseekable() if streamed else io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, data in CONTENT.items():
            with archive.open(name, "w", force_zip64=wide) as entry:
                entry.write(data)
    return bytes(target.data) if streamed else target.getvalue()


def archive_of(folder: Path, data: bytes) -> Archive:
    path = folder / "archive.zip"
    path.write_bytes(data)
    return Archive(Source(path))


def refused(folder: Path, data: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_starts(folder, data)
    return caught.value


def read_starts(folder: Path, data: bytes) -> list[int]:
    archive = archive_of(folder, data)
    return [archive.data_start(entry) for entry in archive.entries]


ways = pytest.mark.parametrize(
    ("streamed", "method", "wide"),
    [(False, 0, False), (True, 0, False), (False, 8, False), (True, 8, False), (False, 0, True), (True, 0, True)],
)


@ways
def test_entries_are_those_of_zipfile(tmp_path, streamed, method, wide):
    data = zipped(streamed, method, wide)
    archive = archive_of(tmp_path, data)
    expected = zipfile.ZipFile(io.BytesIO(data)).infolist()
    seen = [(e.name, e.method, e.crc, e.size, e.packed, e.header) for e in archive.entries]
    assert seen == [
        (e.filename, e.compress_type, e.CRC, e.file_size, e.compress_size, e.header_offset) for e in expected
    ]
    for entry in archive.entries:
        start = archive.data_start(entry)
        content = data[start : start + entry.packed]
        if method:
            content = inflated(archive, entry).read(0, entry.size)
        assert content == CONTENT[entry.name]
    assert mentions(archive.source, b"a/empty")
    assert not mentions(archive.source, b"a/absent")


@ways
def test_every_stored_copy_of_a_crc_is_found(tmp_path, streamed, method, wide):
    data = zipped(streamed, method, wide)
    archive = archive_of(tmp_path, data)
    for entry in archive.entries:
        slots = archive.crc_slots(entry)
        assert len(slots) == 2
        assert {data[slot : slot + 4] for slot in slots} == {struct.pack("<I", entry.crc)}


@pytest.mark.parametrize("streamed", [False, True])
def test_repaired_archives_pass_testzip(tmp_path, streamed):
    data = bytearray(zipped(streamed))
    archive = archive_of(tmp_path, bytes(data))
    start = archive.data_start(archive.by_name["a/x"])
    other = archive.data_start(archive.by_name["b"])
    offsets = np.array([start, start + 149, other + 5])
    masks = np.array([1, 0x80, 0xFF], np.uint8)
    for offset, mask in zip(offsets.tolist(), masks.tolist(), strict=True):
        data[offset] ^= mask
    assert zipfile.ZipFile(io.BytesIO(bytes(data))).testzip() == "a/x"
    assert len(list(problems(archive_of(tmp_path, bytes(data))))) == 2
    where, repair = crc_masks([(0, archive)], offsets, masks)
    assert np.all(np.diff(where) > 0)
    for offset, mask in zip(where.tolist(), repair.tolist(), strict=True):
        data[offset] ^= mask
    assert zipfile.ZipFile(io.BytesIO(bytes(data))).testzip() is None
    assert list(problems(archive_of(tmp_path, bytes(data)))) == []


def test_bytes_outside_all_entries_need_no_repair(tmp_path):
    archive = archive_of(tmp_path, zipped())
    where, _ = crc_masks([(0, archive)], np.array([0, 31]), np.array([1, 1], np.uint8))
    assert len(where) == 0


def test_an_archive_appended_to_by_zipfile_is_read(tmp_path):
    path = tmp_path / "archive.zip"
    path.write_bytes(zipped())
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"PK\5\6 is part of this comment"
        archive.writestr("more", b"x")
    assert set(Archive(Source(path)).by_name) == {*CONTENT, "more"}


def test_bytes_behind_an_archive_are_passed_over_as_zipfile_does(tmp_path):
    archive = archive_of(tmp_path, zipped())
    assert archive.appended == 0
    path = tmp_path / "archive.zip"
    with path.open("ab") as file:
        file.write(b"appended by some tool")
    assert zipfile.ZipFile(path).testzip() is None
    archive = Archive(Source(path))
    assert set(archive.by_name) == set(CONTENT)
    assert archive.appended == len(b"appended by some tool")


def test_an_archive_whose_end_is_out_of_reach_is_told_to_be_appended_to_or_cut(tmp_path):
    error = refused(tmp_path, zipped() + bytes(70_000))
    assert error.reason == "truncated"
    assert "was something appended?" in str(error)


def test_cut_archives_are_truncated(tmp_path):
    data = zipped()
    for length in range(0, len(data), 7):
        assert refused(tmp_path, data[:length]).reason == "truncated"


def test_encrypted_and_spanned_archives_are_told(tmp_path):
    data = bytearray(zipped())
    directory = data.index(b"PK\1\2")
    encrypted = data.copy()
    encrypted[directory + 8] |= 1
    assert refused(tmp_path, encrypted).reason == "encrypted"
    spanned = data.copy()
    spanned[data.index(b"PK\5\6") + 4] = 1
    assert refused(tmp_path, spanned).reason == "spanned"
    elsewhere = data.copy()
    elsewhere[directory + 34] = 1
    assert refused(tmp_path, elsewhere).reason == "spanned"


@pytest.mark.parametrize(
    ("signature", "at", "value", "rule"),
    [
        (b"PK\3\4", 0, b"XX\3\4", "no local header"),
        (b"PK\3\4", 30, b"z", "another name"),
        (b"PK\3\4", 28, b"\xff\xff", "runs into"),
        (b"PK\3\4", 8, b"\x08\x00", "does not fit"),
        (b"PK\1\2", 0, b"XX", "no record"),
        (b"PK\1\2", 20, b"\xf0\xff\xff\x7f", "runs into"),
        (b"PK\1\2", 24, b"\x01", "two sizes differ"),
        (b"PK\1\2", 42, b"\xff\xff\xff\x7f", "runs into"),
        (b"PK\1\2", 46, b"b\0\0", "another name"),
        (b"PK\5\6", 10, b"\x09", "spans several"),
        (b"PK\5\6", 12, b"\xff\xff\xff", "before its end record"),
        (b"PK\5\6", 16, b"\x05", "no record"),
        (b"PK\5\6", 16, b"\xff\xff\xff\xff", "zip64"),
    ],
)
def test_a_broken_rule_is_named(tmp_path, signature, at, value, rule):
    data = bytearray(zipped())
    where = data.index(signature) + at
    data[where : where + len(value)] = value
    error = refused(tmp_path, bytes(data))
    assert rule in str(error)
    assert "\n" not in str(error)


def test_two_entries_of_one_name_have_no_name(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("same", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("same", b"2")
    archive = archive_of(tmp_path, buffer.getvalue())
    assert archive.by_name == {}
    assert len(archive.entries) == 2


def test_a_deflated_entry_that_claims_too_much_is_refused(tmp_path):
    data = bytearray(zipped(method=8))
    directory = data.index(b"PK\1\2")
    data[directory + 24 : directory + 28] = b"\xff\xff\xff\x7f"
    archive = archive_of(tmp_path, bytes(data))
    with pytest.raises(CheckpointError, match="can't inflate"):
        inflated(archive, archive.entries[0])


def test_inflated_content_reads_forwards_backwards_and_across(tmp_path):
    content = np.random.default_rng(1).integers(0, 4, 700_000, dtype=np.uint8).tobytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("big", content)
    parsed = archive_of(tmp_path, buffer.getvalue())
    stream = inflated(parsed, parsed.entries[0])
    generator = np.random.default_rng(2)
    for _ in range(60):
        start = int(generator.integers(0, len(content)))
        count = int(generator.integers(0, min(200_000, len(content) - start) + 1))
        assert stream.read(start, count) == content[start : start + count]
    assert stream.read(len(content), 0) == b""


def test_random_damage_raises_nothing_but_named_reasons(tmp_path):
    generator = np.random.default_rng(11)
    for streamed, method in [(False, 0), (True, 0), (True, 8)]:
        original = zipped(streamed, method)
        for _ in range(300):
            data = bytearray(original)
            for _ in range(generator.integers(1, 4)):
                data[generator.integers(len(data) - 250, len(data))] = generator.integers(256)
            with suppress(CheckpointError):
                list(problems(archive_of(tmp_path, bytes(data))))


def test_an_archive_without_entries_is_read(tmp_path):
    buffer = io.BytesIO()
    zipfile.ZipFile(buffer, "w").close()
    assert archive_of(tmp_path, buffer.getvalue()).entries == ()
