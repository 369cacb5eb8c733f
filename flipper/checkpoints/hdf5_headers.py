"""HDF5 object headers: their messages, where each lies in the file, and the checksums over them.

Source of the layouts: the HDF5 File Format Specification 3.0, section IV.A.1 (versions 1 and 2), for addresses of 8
bytes; of the checksum: Bob Jenkins, lookup3.c, hashlittle (public domain).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from flipper.checkpoints.source import Source

CONTINUATION = 0x10
MAX_BLOCK = 1 << 20
"""Bytes of a block of messages or of a global heap collection; HDF5 makes them of 4096."""
MAX_BLOCKS = 64
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Message:
    """A message of an object header. start: the byte of the file at which its data lies.

    summed: first byte and end of what a checksum covers, which follows at the end; None in headers of version 1.
    """

    kind: int
    start: int
    data: bytes
    summed: tuple[int, int] | None


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


def messages(source: Source, base: int, address: int) -> Iterator[Message]:
    """The messages of the header of the object at `address`; raises CheckpointError or struct.error if it is damaged.

    base: byte of the source from which addresses count.
    """
    header = _header(source, base + address)
    if header is None:
        return
    blocks = [(base + address, *header.block)]
    for _ in range(MAX_BLOCKS):
        if not blocks:
            return
        begin, start, size = blocks.pop(0)
        block = source.read(start, min(size, MAX_BLOCK))
        at = 0
        while at + header.message <= len(block):
            kind, length = struct.unpack_from("<HH" if header.message == 8 else "<BH", block, at)
            at += header.message
            message = Message(
                kind, start + at, block[at : at + length], None if header.message == 8 else (begin, start + size)
            )
            at += length
            if kind == CONTINUATION:
                where, extent = struct.unpack_from("<QQ", message.data)
                blocks.append((base + where, base + where + header.around[0], extent - sum(header.around)))
            yield message


def checksum(data: bytes) -> int:
    """Of metadata of version 2: lookup3's hash of the bytes, 32 bits."""
    a = b = c = (0xDEADBEEF + len(data)) & _WORD
    if not data:
        return c
    whole = (len(data) - 1) // 12 * 12
    for x, y, z in struct.iter_unpack("<III", data[:whole]):
        a, b, c = _mix(a + x & _WORD, b + y & _WORD, c + z & _WORD)
    x, y, z = struct.unpack("<III", data[whole:].ljust(12, b"\0"))
    return _final(a + x & _WORD, b + y & _WORD, c + z & _WORD)


def _turn(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & _WORD


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    a = (a - c & _WORD) ^ _turn(c, 4)
    c = c + b & _WORD
    b = (b - a & _WORD) ^ _turn(a, 6)
    a = a + c & _WORD
    c = (c - b & _WORD) ^ _turn(b, 8)
    b = b + a & _WORD
    a = (a - c & _WORD) ^ _turn(c, 16)
    c = c + b & _WORD
    b = (b - a & _WORD) ^ _turn(a, 19)
    a = a + c & _WORD
    c = (c - b & _WORD) ^ _turn(b, 4)
    b = b + a & _WORD
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    c = ((c ^ b) - _turn(b, 14)) & _WORD
    a = ((a ^ c) - _turn(c, 11)) & _WORD
    b = ((b ^ a) - _turn(a, 25)) & _WORD
    c = ((c ^ b) - _turn(b, 16)) & _WORD
    a = ((a ^ c) - _turn(c, 4)) & _WORD
    b = ((b ^ a) - _turn(a, 14)) & _WORD
    return ((c ^ b) - _turn(b, 24)) & _WORD
