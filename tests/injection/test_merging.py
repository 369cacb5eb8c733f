"""Faults in one element become one row that does what all of them do, in their order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flipper.errors import UsageError
from flipper.faults.effects import FLIP, WRITE, strike
from flipper.injection.changes import merge

BYTE = st.integers(0, 255)
FAULTS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([FLIP, WRITE]), BYTE, BYTE), min_size=1, max_size=25)


def in_order(before: list[int], faults: list[tuple[int, int, int, int]]) -> list[int]:
    """One fault after the other, one bit at a time."""
    after = list(before)
    for flat, op, mask, value in faults:
        for bit in range(8):
            if mask >> bit & 1:
                held = after[flat] >> bit & 1
                new = held ^ 1 if op == FLIP else value >> bit & 1
                after[flat] = after[flat] & ~(1 << bit) | new << bit
    return after


def mixed(faults: list[tuple[int, int, int, int]]) -> bool:
    """Whether an element ends with a bit that was written and another that was only flipped."""
    for element in {flat for flat, *_ in faults}:
        written = turned = 0
        for flat, op, mask, _ in faults:
            if flat == element and op == WRITE:
                written, turned = written | mask, turned & ~mask
            elif flat == element:
                turned ^= mask & ~written
        if written and turned:
            return True
    return False


@settings(max_examples=400)
@given(faults=FAULTS, before=st.lists(BYTE, min_size=6, max_size=6))
def test_merged_faults_do_what_they_do_one_after_the_other(
    faults: list[tuple[int, int, int, int]], before: list[int]
) -> None:
    columns = zip(*faults, strict=True)
    kinds = (np.int64, np.uint8, np.uint64, np.uint64)
    arrays = [np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    if mixed(faults):
        with pytest.raises(UsageError, match="both flipped and written"):
            merge(*arrays)
        return
    flat, op, mask, value = merge(*arrays)
    assert flat.tolist() == sorted({fault[0] for fault in faults})
    after = np.array(before, np.uint64)
    after[flat] = strike(after[flat], op, mask, value)
    assert after.tolist() == in_order(before, faults)


@settings(max_examples=100)
@given(faults=FAULTS)
def test_flips_alone_cancel_in_pairs(faults: list[tuple[int, int, int, int]]) -> None:
    flips = [(flat, FLIP, mask, 0) for flat, _, mask, _ in faults]
    arrays = [
        np.array(c, k)
        for c, k in zip(zip(*flips, strict=True), (np.int64, np.uint8, np.uint64, np.uint64), strict=True)
    ]
    flat, op, mask, _ = merge(*arrays)
    assert set(op.tolist()) == {FLIP}
    expected = in_order([0] * 6, flips)
    assert [expected[index] for index in flat.tolist()] == mask.tolist()
