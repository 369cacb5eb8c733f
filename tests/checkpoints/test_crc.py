"""CRC-32 by linearity against zlib."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flipper.checkpoints.crc import crc_changes


def change_of(length: int, offsets: np.ndarray, masks: np.ndarray) -> int:
    groups, changes = crc_changes(np.zeros(len(offsets), np.int64), length - 1 - offsets, masks)
    assert groups.tolist() == [0]
    return int(changes[0])


@given(st.binary(min_size=1, max_size=400), st.data())
def test_a_change_of_any_bytes_moves_the_crc_as_zlib_says(data, draw):
    offsets = draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, unique=True).map(sorted))
    masks = draw.draw(st.lists(st.integers(0, 255), min_size=len(offsets), max_size=len(offsets)))
    changed = bytearray(data)
    for offset, mask in zip(offsets, masks, strict=True):
        changed[offset] ^= mask
    expected = zlib.crc32(data) ^ zlib.crc32(changed)
    assert change_of(len(data), np.array(offsets), np.array(masks, np.uint8)) == expected


@pytest.mark.parametrize(("length", "count"), [(70_000, 1), (70_000, 33), (3_000_000, 5_000), (20_000_000, 40)])
def test_few_and_many_changes_agree_with_zlib(length, count):
    generator = np.random.default_rng(length + count)
    data = generator.integers(0, 256, length, dtype=np.uint8)
    offsets = np.sort(generator.choice(length, count, replace=False))
    masks = generator.integers(1, 256, count, dtype=np.uint8)
    changed = data.copy()
    changed[offsets] ^= masks
    assert change_of(length, offsets, masks) == zlib.crc32(data) ^ zlib.crc32(changed)


def test_messages_are_kept_apart():
    generator = np.random.default_rng(3)
    messages = [generator.integers(0, 256, size, dtype=np.uint8) for size in (1, 300, 5000, 66_000)]
    groups, distances, masks, expected = [], [], [], {}
    for group, message in enumerate(messages):
        offsets = np.sort(generator.choice(len(message), min(len(message), 60), replace=False))
        mask = generator.integers(1, 256, len(offsets), dtype=np.uint8)
        changed = message.copy()
        changed[offsets] ^= mask
        expected[group] = zlib.crc32(message) ^ zlib.crc32(changed)
        groups += [group] * len(offsets)
        distances += (len(message) - 1 - offsets).tolist()
        masks += mask.tolist()
    found, changes = crc_changes(np.array(groups), np.array(distances), np.array(masks, np.uint8))
    assert dict(zip(found.tolist(), changes.tolist(), strict=True)) == expected


def test_the_fast_way_equals_the_slow_one_beyond_four_gibibytes():
    distances = np.sort(np.random.default_rng(5).integers(0, 1 << 42, 100))[::-1].copy()
    masks = np.arange(1, 101, dtype=np.uint8)
    _, together = crc_changes(np.zeros(100, np.int64), distances, masks)
    alone = 0
    for index in range(100):
        alone ^= int(crc_changes(np.zeros(1, np.int64), distances[index : index + 1], masks[index : index + 1])[1][0])
    assert int(together[0]) == alone


def test_nothing_changed_is_no_change():
    groups, changes = crc_changes(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8))
    assert len(groups) == len(changes) == 0
