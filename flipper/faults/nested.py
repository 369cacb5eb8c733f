"""Draws of distinct units whose doses nest all the way to the whole, for the strata of a spread."""

from __future__ import annotations

import numpy as np

from flipper.faults import sampling
from flipper.faults.lottery import Lottery
from flipper.faults.stream import U64, Stream
from flipper.faults.taken import Taken

BLOCK = 1 << 18
"""Units that enter the lottery together; the outcome doesn't depend on it."""


def nested(stream: Stream, size: int, n: int, *, keep_order: bool = False) -> U64:
    """A uniform n-subset of [0, size), uint64[n], in which those for every smaller n lie.

    The first distinct words of the stream up to half the units; the rest by the lowest tickets of a child of the
    stream, since waiting for the last words would take long. A small layer is soon beyond half, and the doses of
    the whole draw nest only if those of every layer do. keep_order: in that order, else in any.
    Raises TooFewBits when n > size.
    """
    half = size // 2
    if n <= half or n > size:
        return sampling.distinct(stream, size, n, keep_order=keep_order)
    first = sampling.distinct(stream, size, half, keep_order=True)
    taken = Taken(size, size)
    taken.add(first)
    lottery = Lottery(stream.child("second half"), lambda units: units, taken, n - half)
    for start in range(0, size, BLOCK):
        lottery.enter(np.arange(start, min(start + BLOCK, size), dtype=np.uint64))
    return np.concatenate([first, lottery.winners()])
