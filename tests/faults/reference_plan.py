"""Whole plans drawn a second time without flipper, one fault after the other, over safetensors files of floats."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reference_draw import Words, accepted_by_rejection, first_distinct, group_sequence, rest_by_tickets

CODES = {"F16": "<e", "F32": "<f", "F64": "<d"}
MANTISSAS = {"F16": 10, "F32": 23, "F64": 52}
EVERYTHING = range(64)


@dataclass(frozen=True)
class Element:
    """One number of a file: its tensor and flat index, and its bytes as one number."""

    tensor: str
    flat: int
    tag: str
    before: int

    @property
    def layer(self) -> str:
        return self.tensor.rpartition(".")[0] or self.tensor

    @property
    def width(self) -> int:
        return 8 * struct.calcsize(CODES[self.tag])

    def value(self, mask: int = 0) -> float:
        """The number after a flip."""
        number: float = struct.unpack(CODES[self.tag], (self.before ^ mask).to_bytes(self.width // 8, "little"))[0]
        return number

    def field(self, position: int) -> str:
        if position == self.width - 1:
            return "sign"
        return "exponent" if position >= MANTISSAS[self.tag] else "mantissa"


def elements_of(path: Path) -> list[Element]:
    """All elements by tensor name."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    found = []
    for name in sorted(set(header) - {"__metadata__"}):
        tag, (start, stop) = header[name]["dtype"], header[name]["data_offsets"]
        size = struct.calcsize(CODES[tag])
        for flat in range((stop - start) // size):
            first = 8 + length + start + flat * size
            found.append(Element(name, flat, tag, int.from_bytes(data[first : first + size], "little")))
    return found


@dataclass(frozen=True)
class Unit:
    """What one fault may strike; number: of its element among those of the stratum."""

    element: Element
    mask: int
    number: int

    @property
    def row(self) -> tuple[str, int, int]:
        return self.element.tensor, self.element.flat, self.mask


def units_of(elements: Sequence[Element], positions=EVERYTHING, burst: int = 1) -> list[Unit]:
    """A unit for each run of `burst` eligible positions, by element and position."""
    units = []
    for number, element in enumerate(elements):
        for first in range(element.width - burst + 1):
            if all(first + i in positions for i in range(burst)):
                units.append(Unit(element, ((1 << burst) - 1) << first, number))
    return units


def prefix_or_spared(seed: int, name: str, size: int, n: int) -> list[int]:
    """The first distinct words; above half what the first distinct words spare."""
    words = Words(seed, f"positions/{name}")
    if 2 * n <= size:
        return first_distinct(words, size, n)
    spared = set(first_distinct(words, size, size - n))
    return [unit for unit in range(size) if unit not in spared]


def nested(seed: int, name: str, size: int, n: int) -> list[int]:
    """The first distinct words up to half, then the lowest tickets."""
    first = first_distinct(Words(seed, f"positions/{name}"), size, min(n, size // 2))
    tickets = Words(seed, f"positions/{name}\0second half")
    return first + rest_by_tickets(tickets, range(size), lambda unit: unit, set(first), n - len(first))


def guarded(
    seed: int, name: str, units: Sequence[Unit], n: int, passes: Callable[[Unit], bool], one_an_element: bool
) -> list[int]:
    """By rejection, then by tickets of all that pass."""

    def key(unit: int) -> int:
        return units[unit].number if one_an_element else unit

    words = Words(seed, f"positions/{name}")
    chosen, _ = accepted_by_rejection(words, len(units), n, key, lambda unit: passes(units[unit]))
    passing = [unit for unit in range(len(units)) if passes(units[unit])]
    tickets = Words(seed, f"positions/{name}\0passing")
    return chosen + rest_by_tickets(tickets, passing, key, {key(unit) for unit in chosen}, n - len(chosen))


def dealt(seed: int, purpose: str, capacities: Sequence[int], weights: Sequence[int], n: int) -> list[int]:
    """How many faults each group gets."""
    common = math.gcd(*weights)
    sequence = group_sequence(Words(seed, purpose), capacities, [weight // common for weight in weights])
    counts = [0] * len(capacities)
    for _ in range(n):
        counts[next(sequence)] += 1
    return counts


def grouped(elements: Sequence[Element], by: str) -> dict[str, list[Element]]:
    groups: dict[str, list[Element]] = {}
    for element in elements:
        groups.setdefault(getattr(element, by), []).append(element)
    return dict(sorted(groups.items()))


def fields_one_an_element(
    seed: int, fields: dict[str, list[Unit]], weights: dict[str, int], n: int, passes: Callable[[Unit], bool]
) -> list[tuple[str, int, int]]:
    """Faults one by one: a field by weight among those with a free element that passes, then its next word's unit."""
    picks = Words(seed, "fields/all")
    words = {name: Words(seed, f"positions/all/{name}") for name in fields}
    taken: set[int] = set()
    rows = []
    left = list(fields)
    while len(rows) < n:
        number = picks.below(sum(weights[name] for name in left))
        for name in left:
            if number < weights[name]:
                break
            number -= weights[name]
        free = [unit for unit in fields[name] if passes(unit) and unit.number not in taken]
        if not free:
            left.remove(name)
            continue
        while (unit := fields[name][words[name].below(len(fields[name]))]) not in free:
            pass
        taken.add(unit.number)
        rows.append(unit.row)
    return rows
