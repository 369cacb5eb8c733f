"""Collectives: reduce-scatter and all-gather round rings, with trees of other chips that hang on their members.

A ring of n members cuts the vector into n slices. In the reduce-scatter each member sends the next one a slice in every
step, to which that adds its own; in the all-gather the sums go round. What hangs on a member sends it each slice just
before that one needs it, and gets each sum just after: so a tree costs steps, as many as it is deep, and no
bandwidth of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from flipper.mesh.chips import Ints
from flipper.mesh.schedule import Lanes


@dataclass(frozen=True)
class Trees:
    """Chips that hang on members of rings: chip -> (the one that it hangs on, the ring's member, links to that)."""

    hung: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    @cached_property
    def depth(self) -> int:
        """Of the deepest tree."""
        return max((depth for _, _, depth in self.hung.values()), default=0)

    @property
    def links(self) -> Iterator[tuple[int, int]]:
        """(chip, what it hangs on)."""
        return ((chip, parent) for chip, (parent, _, _) in self.hung.items())

    def rows(self, position: dict[int, int]) -> Iterator[tuple[int, int, int, int]]:
        """(chip, what it hangs on, the member's position in its ring, depth)."""
        for chip, (parent, member, depth) in self.hung.items():
            yield chip, parent, position[member], depth


def reduce_scatter(rings: Ints, base: int | Ints, width: int, trees: Trees | None = None) -> Lanes:
    """Member i of each ring ends with slice (i + 1) mod n of the sum.

    rings: chips, [rings, n]. base: the first chunk of each ring's slices, or [rings]. width: chunks of a slice.
    """
    depth = 0 if trees is None else trees.depth
    n = rings.shape[1]
    place = np.arange(n)
    found = [
        Lanes.of(rings, np.roll(rings, -1, axis=1), _per_ring(base), place + depth, n, width, depth, depth + n - 1)
        if n > 1 else Lanes.none()
    ]  # fmt: skip
    if trees is not None and trees.hung:
        chip, parent, member, out = np.array(list(trees.rows(_positions(rings)))).T
        found.append(Lanes.of(chip, parent, base, member + depth - out, n, width, depth - out, depth - out + n))
    return Lanes.joined(found)


def all_gather(rings: Ints, base: int | Ints, width: int, trees: Trees | None = None) -> Lanes:
    """Every member, and all that hangs on it, ends with all slices; member i begins with slice (i + 1) mod n."""
    n = rings.shape[1]
    found = [
        Lanes.of(rings, np.roll(rings, -1, axis=1), _per_ring(base), np.arange(n) + 1, n, width, 0, n - 1)
        if n > 1 else Lanes.none()
    ]  # fmt: skip
    if trees is not None and trees.hung:
        chip, parent, member, out = np.array(list(trees.rows(_positions(rings)))).T
        found.append(Lanes.of(parent, chip, base, member + out, n, width, out - 1, out - 1 + n))
    return Lanes.joined(found)


def _per_ring(base: int | Ints) -> int | Ints:
    return base if isinstance(base, int) else base[:, None]


def _positions(rings: Ints) -> dict[int, int]:
    return {chip: place for ring in rings.tolist() for place, chip in enumerate(ring)}
