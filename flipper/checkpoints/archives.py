"""Archives: where the entries of a zip file lie, and every place where their CRCs are stored."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

from flipper.checkpoints.source import Source
from flipper.errors import CheckpointError

STORED = 0
DEFLATED = 8

DIRECTORY_LIMIT = 128 << 20
"""Bytes of a central directory: a million entries."""

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_FULL = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, as the central directory has it.

    size, packed: bytes of its content, and of the bytes that hold it. header: where its local header begins.
    central: where its record in the central directory begins. limit: where the next entry, or the directory, begins.
    """

    name: str
    method: int
    flags: int
    crc: int
    size: int
    packed: int
    header: int
    central: int
    limit: int


class Archive:
    """A zip archive that fills a source.

    entries: by position. by_name: those whose name occurs once. directory, end: where the central directory and the
    record behind it begin. appended: bytes behind the archive.
    Raises CheckpointError: truncated, header, encrypted, spanned.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.end, count, size, self.directory = _find_directory(source)
        comment = int.from_bytes(source.read(self.end + 20, 2), "little")
        self.appended = source.size - (self.end + _END.size + comment)
        records = _records(source, source.read(self.directory, size), self.directory, count)
        self.entries = _with_limits(source, records, self.directory)
        self.by_name = {entry.name: entry for entry in self.entries}
        self._starts: dict[int, int] = {}
        if len(self.by_name) < len(self.entries):
            counts = Counter(entry.name for entry in self.entries)
            self.by_name = {name: entry for name, entry in self.by_name.items() if counts[name] == 1}

    def data_start(self, entry: Entry) -> int:
        """Where the bytes of an entry begin; reads and checks its local header."""
        start: int | None = self._starts.get(entry.header)
        if start is None:
            start = self._starts[entry.header] = self._read_start(entry)
        return start

    def _read_start(self, entry: Entry) -> int:
        raw = entry.name.encode("utf-8", "surrogateescape")
        header = self.source.read(entry.header, _LOCAL.size + len(raw))
        signature, _version, flags, method, _time, _date, _crc, _packed, _size, name, extra = _LOCAL.unpack_from(header)
        if signature != b"PK\3\4":
            raise broken(self.source, f"no local header at byte {entry.header}, where {entry.name!r} should begin")
        if name != len(raw) or header[_LOCAL.size :] != raw:
            raise broken(self.source, f"the local header of {entry.name!r} bears another name")
        if method != entry.method or flags & 1:
            raise broken(self.source, f"the local header of {entry.name!r} does not fit the central directory")
        start: int = entry.header + _LOCAL.size + name + extra
        if start + entry.packed > entry.limit:
            raise broken(self.source, f"{entry.name!r} runs into what follows it")
        return start

    def crc_slots(self, entry: Entry) -> list[int]:
        """Where the CRC of an entry is stored: central directory, and local header, data descriptor or both."""
        slots = [entry.central + 16]
        start = self.data_start(entry)
        in_header = int.from_bytes(self.source.read(entry.header + 14, 4), "little")
        if not entry.flags & 8 or 0 != in_header == entry.crc:
            slots.append(entry.header + 14)
        if entry.flags & 8:
            behind = start + entry.packed
            found = self.source.read(behind, min(8, self.source.size - behind)).ljust(8, b"\0")
            crc = entry.crc.to_bytes(4, "little")
            if found[:4] == b"PK\x07\x08" and (found[4:] == crc or found[:4] != crc):
                slots.append(behind + 4)
            elif found[:4] == crc:
                slots.append(behind)
        return slots


def mentions(source: Source, name: bytes) -> bool:
    """Whether the central directory holds `name` somewhere: a quick look, enough to tell formats apart.

    Raises CheckpointError when there is no readable directory.
    """
    _, _, size, directory = _find_directory(source)
    return name in source.read(directory, size)


def broken(source: Source, rule: str) -> CheckpointError:
    """The error for a rule of the zip format that is broken."""
    return CheckpointError("header", f"{source.path}: zip: {rule}")


def _find_directory(source: Source) -> tuple[int, int, int, int]:
    """Where the end record begins, how many entries there are, size and place of the central directory."""
    tail_size = min(source.size, _END.size + 0xFFFF)
    tail = source.read(source.size - tail_size, tail_size)
    at = _find_end(tail)
    if at is None:
        seen = "no end-of-central-directory where the file ends"
        raise CheckpointError("truncated", f"{source.path}: {seen}: cut off, or was something appended?")
    _, disk, first_disk, here, count, size, offset, _ = _END.unpack_from(tail, at)
    end = source.size - tail_size + at
    if 0xFFFF in (disk, first_disk, here, count) or _FULL in (size, offset):
        disk, first_disk, here, count, size, offset = _read_end64(source, end, (disk, first_disk, here, count))
    if disk or first_disk or here != count:
        raise CheckpointError("spanned", f"{source.path}: this zip archive spans several files; join them first")
    if offset + size > end:
        raise broken(source, f"the central directory ({size} bytes at {offset}) does not lie before its end record")
    if size > DIRECTORY_LIMIT:
        raise broken(source, f"a central directory of {size} bytes; the limit is {DIRECTORY_LIMIT}")
    return end, count, size, offset


def _find_end(tail: bytes) -> int | None:
    """Where the end record begins: that which ends with the file, comment included, or else the last one.

    Behind the last one stands something that was appended, which torch.load and zipfile pass over.
    """
    last = None
    at = tail.rfind(b"PK\5\6")
    while at >= 0:
        behind = at + _END.size + int.from_bytes(tail[at + 20 : at + 22], "little")
        if behind == len(tail):
            return at
        if last is None and behind < len(tail):
            last = at
        at = tail.rfind(b"PK\5\6", 0, at + 3)
    return last


def _read_end64(source: Source, end: int, short: tuple[int, int, int, int]) -> tuple[int, int, int, int, int, int]:
    if end < _LOCATOR.size + _END64.size:
        raise broken(source, "the zip64 end record is missing")
    signature, disk, offset, disks = _LOCATOR.unpack(source.read(end - _LOCATOR.size, _LOCATOR.size))
    if signature != b"PK\6\7":
        raise broken(source, "the zip64 locator is missing")
    if disk or disks > 1:
        raise CheckpointError("spanned", f"{source.path}: this zip archive spans several files; join them first")
    if offset + _END64.size > end:
        raise broken(source, "the zip64 end record does not lie before its locator")
    record = _END64.unpack(source.read(offset, _END64.size))
    if record[0] != b"PK\6\6":
        raise broken(source, "the zip64 end record is missing")
    _, _, _, _, this_disk, first_disk, here, count, size, start = record
    return this_disk, first_disk, here, count, size, start


def _records(source: Source, data: bytes, start: int, count: int) -> list[Entry]:
    entries: list[Entry] = []
    at = 0
    while at + _CENTRAL.size <= len(data) and len(entries) < count:
        fields = _CENTRAL.unpack_from(data, at)
        if fields[0] != b"PK\1\2":
            raise broken(source, f"no record of the central directory at byte {start + at}")
        _, _, _, flags, method, _, _, crc, packed, size, name, extra, comment, disk, _, _, header = fields
        behind = at + _CENTRAL.size + name
        raw = data[at + _CENTRAL.size : behind]
        if _FULL in (size, packed, header) or disk == 0xFFFF:
            field = data[behind : behind + extra]
            size, packed, header, disk = _wide(source, field, size, packed, header, disk)
        if disk:
            raise CheckpointError("spanned", f"{source.path}: this zip archive spans several files; join them first")
        if flags & 1 or flags & 64:
            raise CheckpointError("encrypted", f"{source.path}: entry {_name(raw)!r} is encrypted; decrypt it first")
        entries.append(Entry(_name(raw), method, flags, crc, size, packed, header, start + at, 0))
        at = behind + extra + comment
    if len(entries) != count or at > len(data):
        raise broken(source, f"the central directory holds {len(entries)} records, {count} are announced")
    return entries


def _name(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _wide(source: Source, extra: bytes, size: int, packed: int, header: int, disk: int) -> tuple[int, int, int, int]:
    """The values of a zip64 extra field in the place of those that are all ones."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        body = extra[at + 4 : at + 4 + length]
        at += 4 + length
        if kind != 1:
            continue
        wide = []
        for value in (size, packed, header):
            if value == _FULL:
                if len(body) < 8:
                    raise broken(source, "a zip64 field is too short")
                value, body = int.from_bytes(body[:8], "little"), body[8:]
            wide.append(value)
        return wide[0], wide[1], wide[2], int.from_bytes(body[:4], "little") if disk == 0xFFFF else disk
    return size, packed, header, disk


def _with_limits(source: Source, records: list[Entry], directory: int) -> tuple[Entry, ...]:
    records.sort(key=lambda entry: entry.header)
    limits = [*(entry.header for entry in records), directory][1:]
    entries = []
    for entry, limit in zip(records, limits, strict=True):
        if entry.header + _LOCAL.size + entry.packed > limit:
            raise broken(source, f"{entry.name!r} runs into what follows it at byte {limit}")
        if entry.method == STORED and entry.packed != entry.size:
            raise broken(source, f"{entry.name!r} is stored, but its two sizes differ")
        entries.append(
            Entry(entry.name, entry.method, entry.flags, entry.crc, entry.size, entry.packed, entry.header,
                  entry.central, limit)
        )  # fmt: skip
    return tuple(entries)
