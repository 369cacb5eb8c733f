"""HDF5 strings of variable length, read without libhdf5, which never returns from some damaged global heaps.

Only attributes in the object's header are known, as those of h5py's files are (unless an object has more than eight in
a file of the newest layout), and addresses of 8 bytes. Source of the layouts: the HDF5 File Format Specification 3.0,
sections III.E (global heap), IV.A.1 (object headers of version 1 and 2) and IV.A.2.m (attribute).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Header:
    """How an object header is laid out. block: start and size of the first block of messages.

    message: bytes in front of a message's content. around: bytes before and after the messages of further blocks.
    """

    block: tuple[int, int]
    message: int
    around: tuple[int, int]


def _header(source: Source, start: int) -> _Header | None:
    head = source.read(start, 16)
    if head[:5] == b"OHDR\2":
        flags = head[5]
        width = 1 << (flags & 3)
        at = start + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        size = int.from_bytes(source.read(at, width), "little")
        return _Header((at + width, size), 6 if flags & 4 else 4, (4, 4))
    if head[0] != 1:
        return None
    return _Header((start + 16, int.from_bytes(head[8:12], "little")), 8, (0, 0))


def _messages(source: Source, base: int, address: int) -> Iterator[tuple[int, bytes]]:
    """Kind and content of the messages of an object header."""
    header = _header(source, base + address)
    if header is None:
        return
    blocks = [header.block]
    for _ in range(MAX_BLOCKS):
        if not blocks:
            return
        start, size = blocks.pop(0)
        block = source.read(start, min(size, MAX_BLOCK))
        at = 0
        while at + header.message <= len(block):
            kind, length = struct.unpack_from("<HH" if header.message == 8 else "<BH", block, at)
            at += header.message
            data = block[at : at + length]
            at += length
            if kind == CONTINUATION:
                where, extent = struct.unpack_from("<QQ", data)
                blocks.append((base + where + header.around[0], extent - sum(header.around)))
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
