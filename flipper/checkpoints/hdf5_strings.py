"""HDF5 strings of variable length, read without libhdf5, which never returns from some damaged global heaps.

Only attributes in the object's header are known, as those of h5py's files are (unless an object has more than eight in
a file of the newest layout), and addresses of 8 bytes. Source of the layouts: the HDF5 File Format Specification 3.0,
sections III.E (global heap) and IV.A.2.m (attribute).
"""

from __future__ import annotations

import struct

from flipper.checkpoints.hdf5_headers import MAX_BLOCK, messages
from flipper.checkpoints.source import Source
from flipper.errors import CheckpointError

ATTRIBUTE = 0x0C
"""Kind of a message in an object header."""
VLEN = 9
"""Class of a datatype."""


def vlen_string_attribute(source: Source, base: int, address: int, name: bytes) -> str | None:
    """The attribute `name` of the object at `address`, a single string of variable length.

    base: byte of the source from which addresses count. None when there is none such, or when it is damaged.
    """
    try:
        for message in messages(source, base, address):
            value = _attribute_value(message.data, name) if message.kind == ATTRIBUTE else None
            if value is not None:
                length, heap, index = struct.unpack("<IQI", value)
                return _heap_object(source, base + heap, index)[:length].decode("utf-8", "backslashreplace")
    except (CheckpointError, struct.error):
        return None
    return None


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
