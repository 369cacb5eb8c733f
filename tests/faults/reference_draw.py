"""The draw, written a second time without flipper: slow, one word at a time, after the words of its rules."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

import numpy as np

MASK = (1 << 64) - 1


def philox4x64(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Ten rounds of Philox4x64 (Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = second >> 64 ^ c1 ^ k0, second & MASK, first >> 64 ^ c3 ^ k1, first & MASK
        k0, k1 = k0 + 0x9E3779B97F4A7C15 & MASK, k1 + 0xBB67AE8584CAA73B & MASK
    return [c0, c1, c2, c3]


def key_of(seed: int, purpose: str) -> tuple[int, int]:
    digest = sha256(b"flipper-draw/1\0" + struct.pack("<Q", seed) + purpose.encode()).digest()
    first, second = struct.unpack("<2Q", digest[:16])
    return first, second


def pure_words(seed: int, purpose: str, n: int) -> list[int]:
    """The first n words with no numpy at all; numpy counts up before it makes a block."""
    key = key_of(seed, purpose)
    words: list[int] = []
    for block in range(1, 2 + n // 4):
        words += philox4x64((block, 0, 0, 0), key)
    return words[:n]


class Words:
    """The same words one by one, by numpy for speed, and how many were read."""

    def __init__(self, seed: int, purpose: str) -> None:
        self.read = 0
        self._numpy = np.random.Philox(key=np.array(key_of(seed, purpose), dtype=np.uint64), counter=0)
        self._block: list[int] = []

    def word(self) -> int:
        if not self._block:
            self._block = self._numpy.random_raw(1024).tolist()[::-1]
        self.read += 1
        return self._block.pop()

    def below(self, size: int) -> int:
        """The next word that is below size when masked to its width."""
        mask = (1 << (size - 1).bit_length()) - 1
        while (value := self.word() & mask) >= size:
            pass
        return value


def first_distinct(words: Words, size: int, n: int) -> list[int]:
    drawn: dict[int, None] = {}
    while len(drawn) < n:
        drawn.setdefault(words.below(size))
    return list(drawn)


def accepted_by_rejection(
    words: Words, size: int, n: int, key: Callable[[int], int], passes: Callable[[int], bool]
) -> tuple[list[int], int]:
    """The units up to the n-th accepted or the last rejected word that is allowed; how many were rejected."""
    units: list[int] = []
    keys: set[int] = set()
    rejected = 0
    while len(units) < n and rejected < 64 * n + 4096:
        unit = words.below(size)
        if key(unit) in keys or not passes(unit):
            rejected += 1
        else:
            units.append(unit)
            keys.add(key(unit))
    return units, rejected


def rest_by_tickets(
    tickets: Words, passing: Sequence[int], key: Callable[[int], int], taken: set[int], wanted: int
) -> list[int]:
    """The units with the lowest tickets, one a key, keys already taken left out."""
    units: list[int] = []
    taken = set(taken)
    for _, unit in sorted([(tickets.word(), unit) for unit in passing]):
        if len(units) < wanted and key(unit) not in taken:
            units.append(unit)
            taken.add(key(unit))
    return units


def group_sequence(words: Words, capacities: Sequence[int], weights: Sequence[int]) -> Iterator[int]:
    """The group of the first, second, ... fault; weights are whole and without a common factor."""
    room = list(capacities)
    while any(r and w for r, w in zip(room, weights, strict=True)):
        members = [g for g in range(len(room)) if room[g] and weights[g]]
        total = sum(weights[g] for g in members)
        while 2 * sum(weights[g] for g in members if room[g]) > total:
            number = words.below(total)
            for group in members:
                if number < weights[group]:
                    break
                number -= weights[group]
            if room[group]:
                room[group] -= 1
                yield group


def chi_square(observed: Sequence[int]) -> float:
    """The probability of so uneven a table under equal chances."""
    from scipy.stats import chisquare

    return float(chisquare(observed).pvalue)
