"""Rezip: make an archive anew with some deflated entries changed, and everything else in it kept."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flipper.checkpoints.archive_crcs import without_crcs
from flipper.checkpoints.archives import STORED, Archive, Entry
from flipper.checkpoints.checkpoint import Region
from flipper.checkpoints.crc import crc_changes
from flipper.checkpoints.elements import Bytes, Int
from flipper.checkpoints.inflate import inflated
from flipper.checkpoints.output import PIECE, atomic_output

Change = tuple[Int, Bytes]
"""Ascending offsets in the content of an entry, and what its bytes there are XORed with."""

ALIGNMENT = 64
_PADDING = 0x4246
"""The extra field by which PyTorch aligns stored entries."""

_FULL = 0xFFFFFFFF


def rezip(archive: Archive, changes: Mapping[str, Change], target: Path, keep_crcs: bool = False) -> tuple[Region, ...]:
    """Replace `target` by `archive` with deflated entries changed: by name, what to XOR where.

    Entries keep their order, names, dates, comments and CRCs, which follow the change unless `keep_crcs`; aligned
    ones stay aligned. Returns the regions of both files, from end to end: what precedes the entries, which is left out,
    header and content of each entry, and the directory with what follows it.
    """
    with atomic_output(target, force=True) as path, path.open("w+b") as output:
        shutil.copymode(target, path)
        records = []
        regions = [Region(0, archive.entries[0].header if archive.entries else archive.directory, 0, 0)]
        unchecked = without_crcs(archive)
        for entry in archive.entries:
            change = changes.get(entry.name)
            start = output.tell()
            if change is None:
                regions += _copy_entry(archive, entry, output)
                records.append(_record(archive, entry, start, entry.flags, entry.crc, entry.packed))
            else:
                crc = entry.crc if keep_crcs or entry.name in unchecked else _changed_crc(entry, change)
                packed = _change_entry(archive, entry, change, crc, output)
                regions.append(Region(entry.header, entry.limit - entry.header, start, output.tell() - start))
                records.append(_record(archive, entry, start, entry.flags & ~8, crc, packed))
        start = output.tell()
        _write_directory(archive, records, output)
        regions.append(Region(archive.directory, archive.source.size - archive.directory, start, output.tell() - start))
    return tuple(regions)


def _copy_entry(archive: Archive, entry: Entry, output: BinaryIO) -> tuple[Region, Region]:
    """Header, content and what follows it up to the next entry, as they are; only the padding may change."""
    header, extra = _local_header(archive, entry)
    start, new_start = archive.data_start(entry), output.tell()
    if entry.method == STORED and start % ALIGNMENT == 0:
        rest = _fields(extra, _PADDING)
        missing = -(output.tell() + len(header) + len(rest) + 4) % ALIGNMENT
        extra = rest + struct.pack("<HH", _PADDING, missing) + b"Z" * missing
    written = output.write(header[:28] + struct.pack("<H", len(extra)) + header[30:] + extra)
    for first in range(start, entry.limit, PIECE):
        output.write(archive.source.read(first, min(PIECE, entry.limit - first)))
    return (
        Region(entry.header, start - entry.header, new_start, written),
        Region(start, entry.limit - start, new_start + written, entry.limit - start),
    )


def _changed_crc(entry: Entry, change: Change) -> int:
    offsets, masks = change
    return entry.crc ^ int(crc_changes([(entry.size - 1 - offsets, masks)])[0])


def _change_entry(archive: Archive, entry: Entry, change: Change, crc: int, output: BinaryIO) -> int:
    """Writes the changed entry; returns its compressed size. Sizes and CRC stand before the data, not behind it."""
    header, extra = _local_header(archive, entry)
    extra = _fields(extra, 1)
    wide = entry.size >= _FULL - (_FULL >> 6)
    if wide:
        extra = struct.pack("<HHQQ", 1, 16, 0, 0) + extra
    start = output.tell()
    output.write(header[:28] + struct.pack("<H", len(extra)) + header[30:] + extra)
    packed = _compress(archive, entry, change, output)
    sizes = struct.pack("<QQ", entry.size, packed)
    output.seek(start + 6)
    output.write(struct.pack("<H", entry.flags & ~8))
    output.seek(start + 14)
    output.write(struct.pack("<3I", crc, *((_FULL, _FULL) if wide else (packed, entry.size))))
    if wide:
        output.seek(start + len(header) + 4)
        output.write(sizes)
    output.seek(0, 2)
    return packed


def _compress(archive: Archive, entry: Entry, change: Change, output: BinaryIO) -> int:
    """Writes the changed content, deflated; returns how many bytes that took."""
    offsets, masks = change
    content = inflated(archive, entry)
    deflater = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = 0
    for first in range(0, entry.size, PIECE):
        block = np.frombuffer(content.read(first, min(PIECE, entry.size - first)), np.uint8).copy()
        begin, end = np.searchsorted(offsets, [first, first + len(block)])
        block[offsets[begin:end] - first] ^= masks[begin:end]
        packed += output.write(deflater.compress(block.data))
    packed += output.write(deflater.flush())
    content.close()
    return packed


def _local_header(archive: Archive, entry: Entry) -> tuple[bytes, bytes]:
    """The local header with the name, and the extra field behind it."""
    raw = archive.source.read(entry.header, archive.data_start(entry) - entry.header)
    cut = 30 + int.from_bytes(raw[26:28], "little")
    return raw[:cut], raw[cut:]


def _fields(extra: bytes, without: int) -> bytes:
    """The fields of an extra field, but those of the kind `without`."""
    kept, at = b"", 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind != without:
            kept += extra[at : at + 4 + length]
        at += 4 + length
    return kept


def _record(archive: Archive, entry: Entry, header: int, flags: int, crc: int, packed: int) -> bytes:
    """The entry's record for the new central directory."""
    fixed = bytearray(archive.source.read(entry.central, 46))
    name, extra, comment = struct.unpack_from("<3H", fixed, 28)
    behind = archive.source.read(entry.central + 46, name + extra + comment)
    fields = _fields(behind[name : name + extra], 1)
    values = (entry.size, packed, header)
    wide = b"".join(struct.pack("<Q", value) for value in values if value >= _FULL)
    if wide:
        fields = struct.pack("<HH", 1, len(wide)) + wide + fields
    size, packed, header = (min(value, _FULL) for value in values)
    struct.pack_into("<H", fixed, 8, flags)
    struct.pack_into("<3I", fixed, 16, crc, packed, size)
    struct.pack_into("<H", fixed, 30, len(fields))
    struct.pack_into("<H", fixed, 34, 0)
    struct.pack_into("<I", fixed, 42, header)
    return bytes(fixed) + behind[:name] + fields + behind[name + extra :]


def _write_directory(archive: Archive, records: list[bytes], output: BinaryIO) -> None:
    start = output.tell()
    for record in sorted(zip(archive.entries, records, strict=True), key=lambda pair: pair[0].central):
        output.write(record[1])
    size, count = output.tell() - start, len(records)
    if count >= 0xFFFF or start >= _FULL or size >= _FULL:
        end = output.tell()
        output.write(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start))
        output.write(struct.pack("<4sIQI", b"PK\6\7", 0, end, 1))
    tail = archive.source.read(archive.end, archive.source.size - archive.end)
    few = min(count, 0xFFFF)
    fields = struct.pack("<4s4H2I", b"PK\5\6", 0, 0, few, few, min(size, _FULL), min(start, _FULL))
    output.write(fields + tail[20:])
