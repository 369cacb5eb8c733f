"""Which units are struck: exactly uniform draws without replacement, the same for ever (flipper-draw/1).

A unit is a number in [0, size): a bit, a window of bits or an element, as the caller counts them. Every
function answers the same whatever the sizes of its batches, which are only there for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flipper.errors import TooFewBits, UsageError
from flipper.faults.lottery import Lottery
from flipper.faults.stream import U64, Stream
from flipper.faults.taken import Taken, first_occurrences

Key: TypeAlias = Callable[[U64], U64]
Accept: TypeAlias = Callable[[U64], NDArray[np.bool_]]

_BATCH = 1 << 18  # units or faults handled together: a few megabytes of temporaries
_FEW = 4  # units beyond those wanted in a first batch, for a few rejections without a second one


def distinct(stream: Stream, size: int, n: int, *, keep_order: bool = False) -> U64:
    """The first n distinct integers of the stream in [0, size), uint64[n]: a uniform n-subset.

    Sorted, or in stream order with keep_order. Above half the population the size - n that are spared are
    drawn instead, and what is left is returned sorted either way. Raises TooFewBits when n > size.
    """
    if n > size:
        raise TooFewBits(f"{n:,} asked for, but only {size:,} can be struck; ask for fewer faults", size)
    if 2 * n > size:
        return _complement(_sorted_prefix(stream, size, size - n), size)
    return _ordered_prefix(stream, size, n) if keep_order else _sorted_prefix(stream, size, n)


def _sorted_prefix(stream: Stream, size: int, n: int) -> U64:
    if n == 0:
        return np.empty(0, dtype=np.uint64)
    drawn = stream.below(size, n)
    drawn.sort()
    have = _pack(drawn)
    further = drawn[:0]  # the few that later words add
    while missing := n - have - len(further):
        # As many words as numbers missing: only if all of them are new is the set full, so the last word
        # read is always the one that filled it.
        more = stream.below(size, missing)
        more.sort()
        more = np.concatenate([further, more[~_among(more, drawn[:have])]])
        more.sort(kind="stable")  # merges two ascending runs in one pass
        further = more[: _pack(more)]
    drawn[have:] = further
    drawn.sort(kind="stable")
    return drawn


def _pack(ascending: U64) -> int:
    """Move the distinct numbers to the front; returns how many there are."""
    # Not np.unique: it hashes integers since numpy 2.3, and takes half a minute for 10**7.
    have = 0
    for start in range(0, len(ascending), _BATCH):
        block = ascending[start : start + _BATCH]
        new = np.ones(len(block), dtype=np.bool_)
        np.not_equal(block[1:], block[:-1], out=new[1:])
        new[0] = have == 0 or block[0] != ascending[have - 1]
        block = block[new]
        ascending[have : have + len(block)] = block
        have += len(block)
    return have


def _among(values: U64, ascending: U64) -> NDArray[np.bool_]:
    """Which of the values are among the ascending ones, of which there are some; quick if the values ascend too."""
    places = np.searchsorted(ascending, values)
    found: NDArray[np.bool_] = ascending[np.minimum(places, len(ascending) - 1)] == values
    return found


def _complement(spared: U64, size: int) -> U64:
    struck = np.ones(size, dtype=np.bool_)
    struck[spared] = False
    left = np.empty(size - len(spared), dtype=np.uint64)
    have = 0
    for start in range(0, size, _BATCH):
        block = np.flatnonzero(struck[start : start + _BATCH])
        left[have : have + len(block)] = block + start
        have += len(block)
    return left


def _ordered_prefix(stream: Stream, size: int, n: int) -> U64:
    taken = Taken(size, n)
    drawn = np.empty(n, dtype=np.uint64)
    have = 0
    while have < n:
        more = stream.below(size, n - have)
        more = more[~taken.holds(more)]
        more = more[first_occurrences(more)]
        taken.add(more)
        drawn[have : have + len(more)] = more
        have += len(more)
    return drawn


def first_accepted(
    stream: Stream,
    size: int,
    n: int,
    *,
    key: Key | None = None,
    accept: Accept | None = None,
    enumerate_passing: Callable[[], Iterable[U64]] | None = None,
) -> U64:
    """The first n units of the stream that pass a guard and don't share a key, uint64[n] in stream order.

    key: the element of each unit, where an element takes one fault only; it must not fall as units rise.
    accept: which units pass; a pure function of each unit, asked for some in stream order.
    enumerate_passing: all units that pass, ascending, in blocks of any size; by default `accept` is asked
    for every unit.

    After 64 n + 4096 rejections the rest is drawn from the enumerated units, through a child of the stream:
    uniform among those with free keys, since the rejections so far say nothing about these. Raises
    TooFewBits, with the number of units that pass, when there are not enough.
    """
    key = key or _itself
    span = int(key(np.array([size - 1], dtype=np.uint64))[0]) + 1 if size else 0
    possible = n <= min(size, span)
    taken = Taken(span, n if possible else 1)
    drawn = np.empty(0, dtype=np.uint64)
    if possible:
        drawn = _by_rejection(stream, size, n, key, _remembering(accept, size, n) if accept else None, taken)
    if len(drawn) == n:
        return drawn
    # If it can't be, all that is left to do is to count what passes: the lottery needs to keep no more than one.
    lottery = Lottery(stream.child("passing"), key, taken, n - len(drawn) if possible else 1)
    for units in enumerate_passing() if enumerate_passing else _all_passing(size, accept):
        lottery.enter(units)
    rest = lottery.winners()
    if len(drawn) + len(rest) < n:
        raise TooFewBits(_shortage(n, lottery.units, lottery.keys), lottery.keys)
    return np.concatenate([drawn, rest])


def _by_rejection(stream: Stream, size: int, n: int, key: Key, accept: Accept | None, taken: Taken) -> U64:
    """What the stream gives up to the n-th accepted or the last allowed rejected unit; fills `taken`."""
    parts = [np.empty(0, dtype=np.uint64)]
    wanted, spare = n, 64 * n + 4096
    batch = n + n // 8 + _FEW
    while wanted > 0 and spare > 0:
        start = stream.position
        batch = min(batch, max(8 * _BATCH, n // 4))
        units = stream.below(size, batch)
        keys = key(units)
        passed = _passed(units, keys, accept, taken)
        used = _end(passed, wanted, spare)
        if used < batch:  # give back the words that were read ahead
            stream.seek(start)
            stream.below(size, used)
        chosen = np.flatnonzero(passed[:used])
        taken.add(keys[chosen])
        parts.append(units[chosen])
        wanted -= len(chosen)
        spare -= used - len(chosen)
        # Twice as many, but not many more than it takes if as large a part is accepted as before.
        batch = min(2 * batch, wanted * used // max(len(chosen), 1) * 9 // 8 + _FEW)
    return np.concatenate(parts)


def _passed(units: U64, keys: U64, accept: Accept | None, taken: Taken) -> NDArray[np.bool_]:
    """Which units of a batch are accepted: free key, passing the guard, first of their key to do so."""
    passed = ~taken.holds(keys)
    if accept:
        free = np.flatnonzero(passed)
        passed[free] = accept(units[free])
    passing = np.flatnonzero(passed)
    passed[passing] = first_occurrences(keys[passing])
    return passed


def _end(passed: NDArray[np.bool_], wanted: int, spare: int) -> int:
    """The length of the batch up to the last wanted or the last spare unit, whichever comes first."""
    end = len(passed)
    for positions, allowed in ((np.flatnonzero(passed), wanted), (np.flatnonzero(~passed), spare)):
        if len(positions) >= allowed:
            end = min(end, int(positions[allowed - 1]) + 1)
    return end


def _remembering(accept: Accept, size: int, n: int) -> Accept:
    """The same guard, that looks at no unit twice: near the whole population most words are repeats."""
    if not Taken.small(size, n):
        return accept
    known = np.zeros(size, dtype=np.uint8)  # 0 not asked, 1 fails, 2 passes

    def remembered(units: U64) -> NDArray[np.bool_]:
        new = units[known[units] == 0]
        if len(new):
            new = new[first_occurrences(new)]
            known[new] = 1 + accept(new).astype(np.uint8)
        passes: NDArray[np.bool_] = known[units] == 2
        return passes

    return remembered


def _all_passing(size: int, accept: Accept | None) -> Iterator[U64]:
    for start in range(0, size, _BATCH):
        units = np.arange(min(_BATCH, size - start), dtype=np.uint64) + np.uint64(start)
        yield units[accept(units)] if accept else units


def _itself(units: U64) -> U64:
    return units


def _shortage(n: int, units: int, keys: int) -> str:
    asked = f"{n:,} asked for, but only {units:,} {'place passes' if units == 1 else 'places pass'}"
    where = "" if keys == units else f", in {keys:,} elements that take one fault each"
    return f"{asked}{where}; ask for fewer faults, or loosen the guards"


def allocate(stream: Stream, capacities: Sequence[int], n: int, weights: Sequence[Fraction | int] | None = None) -> U64:
    """How many of n faults each group gets, uint64[groups], when each picks a group with room by weight.

    capacities: the units of each group. weights: exact and >= 0 (UsageError), equal by default; only their
    ratios matter. The counts for n never exceed those for n + 1.

    The groups with weight and room share a range of integers by weight, in their order, and each fault goes
    to the group of the next integer that falls to one with room. Once the groups with room own half of the
    range or less, a new range is made of them alone. Raises TooFewBits when n exceeds the room.
    """
    shares = whole_shares(weights if weights is not None else [1] * len(capacities), len(capacities))
    reachable = sum(capacity for capacity, share in zip(capacities, shares, strict=True) if share)
    if n > reachable:
        raise TooFewBits(
            f"{n:,} asked for, but the groups with a weight have room for {reachable:,}; ask for fewer faults",
            reachable,
        )
    weight = np.array(shares, dtype=np.uint64)
    room = np.array(capacities, dtype=np.uint64)
    counts = np.zeros(len(capacities), dtype=np.uint64)
    while n > 0:
        open_groups = np.flatnonzero((weight > 0) & (counts < room))
        dealt = _deal(stream, weight[open_groups], (room - counts)[open_groups], n)
        counts[open_groups] += dealt
        n -= int(dealt.sum())
    return counts


def _deal(stream: Stream, weight: U64, room: U64, n: int) -> U64:
    """Deal up to n faults by one range, until half of its weight has no room left."""
    edges = np.cumsum(weight)
    total = int(edges[-1])
    counts = np.zeros(len(weight), dtype=np.uint64)
    left = total
    while n > 0 and 2 * left > total:
        start = stream.position
        numbers = stream.below(total, min(n, _BATCH))
        picked = _tally(numbers, edges)
        full = counts == room
        if np.all(full | (counts + picked < room)):
            placed = np.where(full, np.uint64(0), picked)
        else:
            placed, lost, used = _fill(numbers, edges, weight, room - counts, left - total // 2)
            left -= lost
            if used < len(numbers):  # give back the words that were read ahead
                stream.seek(start)
                stream.below(total, used)
        counts += placed
        n -= int(placed.sum())
    return counts


def _tally(numbers: U64, edges: U64) -> U64:
    """How many of the numbers fall to each group, which owns those below its edge and not below the one before."""
    below = np.searchsorted(np.sort(numbers), edges).astype(np.uint64)
    below[1:] -= below[:-1].copy()
    return below


def _fill(numbers: U64, edges: U64, weight: U64, room: U64, enough: int) -> tuple[U64, int, int]:
    """Place numbers one after the other where there is room, until groups of `enough` weight have become full.

    Returns the faults placed in each group, the weight that has become full, and the numbers used.
    """
    picks = np.searchsorted(edges, numbers, side="right")
    turn = _occurrence(picks)
    lost = np.cumsum(np.where(turn + np.uint64(1) == room[picks], weight[picks], np.uint64(0)))
    used = min(int(np.searchsorted(lost, np.uint64(enough))) + 1, len(numbers))
    placed = picks[:used][turn[:used] < room[picks[:used]]]
    return np.bincount(placed, minlength=len(room)).astype(np.uint64), int(lost[used - 1]), used


def _occurrence(picks: NDArray[np.intp]) -> U64:
    """How many times each pick was picked before, uint64[len(picks)]."""
    order = np.argsort(picks, kind="stable")
    ascending = picks[order]
    starts = np.flatnonzero(np.concatenate([[True], ascending[1:] != ascending[:-1]]))
    before = np.empty(len(picks), dtype=np.uint64)
    before[order] = np.arange(len(picks)) - np.repeat(starts, np.diff(starts, append=len(picks)))
    return before


def whole_shares(weights: Sequence[Fraction | int], groups: int) -> list[int]:
    """The smallest whole numbers in the ratios of the weights."""
    if len(weights) != groups:
        raise ValueError(f"{len(weights)} weights for {groups} groups")
    if any(weight < 0 for weight in weights):
        raise UsageError(f"a weight is {min(weights)}; weights can't be negative")
    scale = lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * scale) for weight in weights]
    common = gcd(*numbers) or 1
    shares = [number // common for number in numbers]
    if sum(shares) >= 1 << 64:
        raise UsageError("the weights are too far apart; give them with fewer digits")
    return shares
