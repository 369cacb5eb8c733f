"""CRC-32 by linearity against zlib."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flipper.checkpoints.crc import BLOCK, crc_changes


def change_of(length: int, offsets: np.ndarray, masks: np.ndarray) -> int:
    (change,) = crc_changes([(length - 1 - offsets, masks)])
    return int(change)


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
    changed_bytes, expected = [], []
    for message in messages:
        offsets = np.sort(generator.choice(len(message), min(len(message), 60), replace=False))
        mask = generator.integers(1, 256, len(offsets), dtype=np.uint8)
        changed = message.copy()
        changed[offsets] ^= mask
        expected.append(zlib.crc32(message) ^ zlib.crc32(changed))
        changed_bytes.append((len(message) - 1 - offsets, mask))
    assert crc_changes(changed_bytes).tolist() == expected


def test_the_fast_way_equals_the_slow_one_beyond_four_gibibytes():
    distances = np.sort(np.random.default_rng(5).integers(0, 1 << 42, 100))[::-1].copy()
    masks = np.arange(1, 101, dtype=np.uint8)
    (together,) = crc_changes([(distances, masks)])
    alone = 0
    for index in range(100):
        alone ^= int(crc_changes([(distances[index : index + 1], masks[index : index + 1])])[0])
    assert int(together) == alone


def test_more_bytes_than_are_done_together_of_messages_long_and_short():
    """Messages that end within a block of work, at its edge, and that take several."""
    generator = np.random.default_rng(8)
    messages = [generator.integers(0, 256, size, dtype=np.uint8) for size in (10, BLOCK - 10, 1, 5 * BLOCK + 3, 7)]
    others = [generator.integers(0, 256, len(message), dtype=np.uint8) for message in messages]
    changes = crc_changes((np.arange(len(m))[::-1], m ^ o) for m, o in zip(messages, others, strict=True))
    assert changes.tolist() == [zlib.crc32(m) ^ zlib.crc32(o) for m, o in zip(messages, others, strict=True)]


def test_nothing_changed_is_no_change():
    assert len(crc_changes([])) == 0
    assert crc_changes([(np.zeros(0, np.int64), np.zeros(0, np.uint8))]).tolist() == [0]
