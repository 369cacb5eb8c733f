"""CRC-32 under XOR: how a checksum changes when bytes do, told from where they are, without reading any data.

CRC-32 is linear over GF(2) up to a constant: the CRC of a message changes by the CRC, without the constant, of the
change. A mask byte followed by d unchanged bytes contributes its remainder times x^(8 d) modulo the polynomial.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from flipper.checkpoints.elements import Bytes, Int

Words = np.ndarray[Any, np.dtype[np.uint32]]

_POLYNOMIAL = 0xEDB88320
"""That of zip, in reversed bit order: bit 31 is the coefficient of x^0."""

_FEW = 32
"""Up to this many bytes are done one by one: the tables of the vectorised way take some ms to build."""

BLOCK = 1 << 16
"""Bytes done together: what is made of them stays in cache."""


def crc_changes(messages: Iterable[tuple[Int, Bytes]]) -> Words:
    """How the CRC-32 of each message changes, uint32[messages], when bytes of it are XORed with masks.

    messages: of each, how many bytes of it follow each byte that changes (descending), and the masks.
    """
    changes: list[int] = []
    waiting: list[tuple[int, Int, Bytes]] = []
    count = 0
    for number, (distances, masks) in enumerate(messages):
        changes.append(0)
        for first in range(0, len(masks), BLOCK):
            part = slice(first, first + BLOCK)
            waiting.append((number, distances[part], masks[part]))
            count += len(masks[part])
            if count >= BLOCK:
                _add(changes, waiting)
                waiting, count = [], 0
    _add(changes, waiting)
    return np.array(changes, np.uint32)


def _add(changes: list[int], parts: Sequence[tuple[int, Int, Bytes]]) -> None:
    """XOR what the parts of some messages, each with the message's number, contribute to the changes."""
    if sum(len(masks) for _, _, masks in parts) <= _FEW:
        for number, distances, masks in parts:
            for distance, mask in zip(distances.tolist(), masks.tolist(), strict=True):
                changes[number] ^= _product(_byte_table()[mask], _power(distance))
        return
    groups = np.repeat([number for number, _, _ in parts], [len(masks) for _, _, masks in parts])
    # A byte d places before the end is the byte itself as a state of the register, d + 1 places before it.
    places = np.concatenate([distances for _, distances, _ in parts]) + 1
    values = np.concatenate([masks for _, _, masks in parts]).astype(np.uint32)
    for level in range(8):
        values = _advance(values, places & 255, _tables(level), 1 if level == 0 else 4)
        groups, places, values = _merge(groups, places >> 8, values)
        if not places.any():
            break
    for number, value in zip(groups.tolist(), values.tolist(), strict=True):
        changes[number] ^= value


def _advance(values: Words, digits: Int, tables: Words, width: int = 4) -> Words:
    """Each value moved on by its digit: the XOR of a table entry for each of its `width` low bytes."""
    rows = digits << 10
    result = tables.take(rows + (values & 255))
    for byte in range(1, width):
        rows += 256
        result ^= tables.take(rows + (values >> np.uint32(8 * byte) & 255))
    return result


@cache
def _tables(level: int) -> Words:
    """For each digit 0 to 255 and each byte 0 to 3 of a value: that byte's values times x^(8 digit 256^level), flat."""
    identity = np.concatenate([np.arange(256, dtype=np.uint32) << np.uint32(8 * byte) for byte in range(4)])
    if level == 0:
        step = (identity >> np.uint32(8)) ^ np.array(_byte_table(), np.uint32)[identity & 255]
    else:
        below = _tables(level - 1)
        step = _advance(below[255 << 10 :], np.ones(1024, np.int64), below)
    tables = identity
    for _ in range(8):
        tables = np.concatenate([tables, _advance(tables, np.zeros(len(tables), np.int64), step)])
        step = _advance(step, np.zeros(1024, np.int64), step)
    return tables


def _merge(groups: Int, distances: Int, values: Words) -> tuple[Int, Int, Words]:
    """Neighbours of one group and one distance become one."""
    starts = np.flatnonzero(np.concatenate(([True], (groups[1:] != groups[:-1]) | (distances[1:] != distances[:-1]))))
    if len(starts) == len(groups):
        return groups, distances, values
    return groups[starts], distances[starts], np.bitwise_xor.reduceat(values, starts)


def _product(left: int, right: int) -> int:
    """Product of two polynomials modulo the polynomial."""
    product = 0
    while left:
        if left & 0x80000000:
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product


def _power(distance: int) -> int:
    """x^(8 distance) modulo the polynomial."""
    power = 1 << 31
    for bit in range(distance.bit_length()):
        if distance >> bit & 1:
            power = _product(power, _square(bit))
    return power


@cache
def _square(bit: int) -> int:
    """x^(8 * 2^bit) modulo the polynomial."""
    if bit == 0:
        return 1 << 23
    return _product(_square(bit - 1), _square(bit - 1))


@cache
def _byte_table() -> tuple[int, ...]:
    """The remainder of each byte."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)
