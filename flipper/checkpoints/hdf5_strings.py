"""HDF5 strings of variable length, read without libhdf5, which never returns from some damaged global heaps.

Only what h5py writes by default is known: object headers of version 1, addresses of 8 bytes. Source of the layouts: the
HDF5 File Format Specification 3.0, sections III.E (global heap), IV.A.1.a (object header) and IV.A.2.m (attribute).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from flipper.checkpoints.source import Source
from flipper.errors import CheckpointError

CONTINUATION, ATTRIBUTE = 0x10, 0x0C
"""Kinds of messages in an object header."""
VLEN = 9
"""Class of a datatype."""
MAX_BLOCK = 1 << 20
"""Bytes of a block of messages or of a global heap collection; HDF5 makes them of 4096."""
MAX_BLOCKS = 64


def vlen_string_attribute(source: Source, base: int, address: int, name: bytes) -> str | None:
    """The attribute `name` of the object at `address`, a single string of variable length.

    base: byte of the source from which addresses count. None when there is none such, or when it is damaged.
    """
    try:
        for kind, data in _messages(source, base, address):
            value = _attribute_value(data, name) if kind == ATTRIBUTE else None
            if value is not None:
                length, heap, index = struct.unpack("<IQI", value)
                return _heap_object(source, base + heap, index)[:length].decode("utf-8", "backslashreplace")
    except (CheckpointError, struct.error):
        return None
    return None


def _messages(source: Source, base: int, address: int) -> Iterator[tuple[int, bytes]]:
    """Kind and content of the messages of an object header."""
    version, _, _, _, size = struct.unpack("<BBHII", source.read(base + address, 12))
    blocks = [(base + address + 16, size)] if version == 1 else []
    for _ in range(MAX_BLOCKS):
        if not blocks:
            return
        start, size = blocks.pop(0)
        block = source.read(start, min(size, MAX_BLOCK))
        at = 0
        while at + 8 <= len(block):
            kind, length = struct.unpack_from("<HH", block, at)
            data = block[at + 8 : at + 8 + length]
            at += 8 + length
            if kind == CONTINUATION:
                where, extent = struct.unpack_from("<QQ", data)
                blocks.append((base + where, extent))
            yield kind, data


def _attribute_value(message: bytes, name: bytes) -> bytes | None:
    """The bytes of an attribute that is a single string of variable length and has this name."""
    version, _, name_size, type_size, space_size = struct.unpack_from("<BBHHH", message)
    if version not in (1, 2, 3):
        return None
    at = 9 if version == 3 else 8
    parts = []
    for size in (name_size, type_size, space_size):
        parts.append(message[at : at + size])
        at += -(-size // 8) * 8 if version == 1 else size
    stored, datatype, space = parts
    if stored.rstrip(b"\0") != name or len(datatype) < 8 or datatype[0] & 15 != VLEN or datatype[1] & 15 != 1:
        return None
    scalar = len(space) >= 2 and space[1] == 0
    return message[at : at + 16] if scalar else None


def _heap_object(source: Source, start: int, wanted: int) -> bytes:
    """An object of the global heap collection at byte `start`; empty when it isn't there."""
    signature, _, size = struct.unpack("<4sIQ", source.read(start, 16))
    if signature != b"GCOL" or size > MAX_BLOCK:
        return b""
    collection = source.read(start, size)
    at = 16
    while at + 16 <= len(collection):
        index, _, _, length = struct.unpack_from("<HHIQ", collection, at)
        if index in (0, wanted):
            return collection[at + 16 : at + 16 + length] if index else b""
        at += 16 + -(-length // 8) * 8
    return b""
