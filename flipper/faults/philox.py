"""Philox4x64-10 at any word index, vectorised: the same words as Stream gives, without those in between."""

from __future__ import annotations

import numpy as np

from flipper.faults.stream import U64, Stream

_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
ROUNDS = 10

DENSE = 64
"""Where more than one in so many words is wanted, it is faster to make all of them in turn."""


def words_at(stream: Stream, indexes: U64) -> U64:
    """Words number `indexes` of a new stream with this seed and purpose; uint64, same shape.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    words = np.empty_like(indexes)
    for first in range(0, len(indexes), 1 << 16):
        part = indexes[first : first + (1 << 16)]
        low, high = int(part.min()), int(part.max())
        if high - low < DENSE * len(part):
            run = Stream(stream.seed, stream.purpose)
            run.seek(low)
            words[first : first + len(part)] = run.words(high - low + 1)[part - np.uint64(low)]
        else:
            words[first : first + len(part)] = _words(stream.key, part)
    return words


def _words(key: tuple[int, int], indexes: U64) -> U64:
    # numpy counts up before it makes four words, so the first four belong to counter 1.
    counter = (indexes >> np.uint64(2)) + np.uint64(1)
    zero = np.zeros_like(counter)
    state = [counter, zero, zero, zero]
    for turn in range(ROUNDS):
        keys = [np.uint64((word + turn * weyl) & 0xFFFFFFFFFFFFFFFF) for word, weyl in zip(key, _WEYL, strict=True)]
        high0, low0 = _product(_MULTIPLIERS[0], state[0])
        high1, low1 = _product(_MULTIPLIERS[1], state[2])
        state = [high1 ^ state[1] ^ keys[0], low1, high0 ^ state[3] ^ keys[1], low0]
    lane = (indexes & np.uint64(3)).astype(np.int64)
    chosen: U64 = np.choose(lane, state).astype(np.uint64)
    return chosen


def _product(factor: np.uint64, words: U64) -> tuple[U64, U64]:
    """High and low half of the 128-bit products."""
    factor_low, factor_high = factor & _LOW, factor >> _HALF
    low, high = words & _LOW, words >> _HALF
    lows = factor_low * low
    middle = factor_high * low + (lows >> _HALF)
    cross = factor_low * high + (middle & _LOW)
    return factor_high * high + (middle >> _HALF) + (cross >> _HALF), factor * words
