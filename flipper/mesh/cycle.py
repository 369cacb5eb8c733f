"""Cycle: one ring over all survivors of a mesh that crosses each link at most once in each direction.

2x2 blocks of survivors are cycles of four chips; cycles whose edges lie side by side are joined into one, which for
blocks is the walk round a spanning tree of them. What can't be joined so hangs on by one link, and is walked to and
back. So a ring there is wherever the survivors are connected; its hops are to neighbours wherever blocks tile the mesh.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flipper.mesh.chips import Mesh, Route


@dataclass(frozen=True)
class Cycle:
    """The survivors in the order of the ring, and the route from each to the next: (from, ..., to).

    core: those of its largest part in which all hops are to neighbours, in the order of a ring of its own.
    """

    chips: tuple[int, ...]
    routes: tuple[Route, ...]
    core: tuple[int, ...]

    @property
    def long_hops(self) -> int:
        """Hops over more than one link."""
        return sum(len(route) > 2 for route in self.routes)

    @property
    def crossings(self) -> int:
        """Links crossed in one round."""
        return sum(len(route) - 1 for route in self.routes)


def cycle(mesh: Mesh) -> Cycle:
    """The ring with the fewest hops over more than one link that is found. Raises UsageError: survivors are cut off."""
    mesh.refuse_parts()
    least = _least_long_hops(mesh)
    best: Cycle | None = None
    for (row, column), mended in itertools.product(_alignments(mesh), (False, True)):
        found = _walked(mesh, _Cover(mesh, row, column, mended).joined())
        if best is None or (found.long_hops, found.crossings) < (best.long_hops, best.crossings):
            best = found
        if best.long_hops <= least:
            break
    assert best is not None
    return best


def _least_long_hops(mesh: Mesh) -> int:
    """Fewer there can't be: neighbours differ in the parity of row + column, so a ring alternates."""
    even = sum(sum(mesh.place(chip)) % 2 == 0 for chip in mesh.survivors)
    return abs(2 * even - len(mesh.survivors))


def _alignments(mesh: Mesh) -> list[tuple[int, int]]:
    """First row and column of the blocks, those with the most whole blocks first."""
    alive = mesh.alive.reshape(mesh.rows, mesh.columns)
    whole = alive[:-1, :-1] & alive[1:, :-1] & alive[:-1, 1:] & alive[1:, 1:]
    counts = {(row, column): int(np.count_nonzero(whole[row::2, column::2])) for row in (0, 1) for column in (0, 1)}
    return sorted(counts, key=lambda start: (-counts[start], start))


class _Cover:
    """Cycles that cover all survivors: of four chips, of two that are linked both ways, of one alone.

    mended: with chips that no block holds taken into longer cycles, as far as that goes.
    ends: chip -> its neighbours in its cycle. leader: chip -> another of its cycle, as union-find has it.
    """

    def __init__(self, mesh: Mesh, row: int, column: int, mended: bool) -> None:
        self.mesh = mesh
        self.ends: list[list[int]] = [[] for _ in range(mesh.size)]
        self.leader = list(range(mesh.size))
        self._place_blocks(row, column)
        if mended:
            self._mend()
        self._place_pairs()

    def _place_blocks(self, row: int, column: int) -> None:
        alive, width = self.mesh.alive.tolist(), self.mesh.columns
        for top in range(row, self.mesh.rows - 1, 2):
            for a in range(top * width + column, top * width + width - 1, 2):
                b, c, d = a + 1, a + width, a + width + 1
                if alive[a] and alive[b] and alive[c] and alive[d]:
                    self.ends[a], self.ends[b], self.ends[c], self.ends[d] = [b, c], [a, d], [a, d], [b, c]
                    self.leader[b] = self.leader[c] = self.leader[d] = a

    def _mend(self) -> None:
        """Give as many chips as can be two neighbours: a largest matching in which each chip has two partners.

        Neighbours differ in the parity of row + column, so augmenting paths from one parity to the other do.
        """
        parity = [sum(self.mesh.place(chip)) % 2 for chip in range(self.mesh.size)]
        useless: set[int] = set()
        for chip in self.mesh.survivors:
            while not parity[chip] and len(self.ends[chip]) < 2 and self._augment(chip, useless):
                pass
        for chip in self.mesh.survivors:
            if len(self.ends[chip]) == 1:  # one alone is better than two ends of a path, which would all be taken apart
                self._augment(chip, set(), to_half=True)
        self.leader = list(range(self.mesh.size))
        for chip in self.mesh.survivors:
            if len(self.ends[chip]) < 2:
                self._take_apart(chip)
        for chip in self.mesh.survivors:
            for other in self.ends[chip]:
                self.leader[self.first(other)] = self.first(chip)

    def _augment(self, start: int, useless: set[int], to_half: bool = False) -> bool:
        """Exchange links along a path from a chip to one that lacks a neighbour, too, so that both gain one.

        to_half: to one that has a single neighbour, and loses it. useless: chips from which none is found. Returns
        whether there was such a path.
        """
        came: dict[int, int] = {}
        queue = [start]
        seen = {start}
        for here in queue:
            for there in self.mesh.linked[here]:
                if there in came or there in useless or there in self.ends[here]:
                    continue
                came[there] = here
                if len(self.ends[there]) < 2 and not to_half:
                    self._exchange(there, came)
                    return True
                for back in self.ends[there]:
                    if back not in seen:
                        seen.add(back)
                        came[back] = there
                        queue.append(back)
                        if to_half and len(self.ends[back]) == 1:
                            self._exchange(back, came, linking=False)
                            return True
        useless.update(each for each in came if each not in seen)
        return False

    def _exchange(self, chip: int, came: dict[int, int], linking: bool = True) -> None:
        while chip in came:
            other = came[chip]
            if linking:
                self.ends[chip].append(other)
                self.ends[other].append(chip)
            else:
                self.ends[chip].remove(other)
                self.ends[other].remove(chip)
            chip, linking = other, not linking

    def _take_apart(self, chip: int) -> None:
        """Free all chips of a path that isn't closed."""
        path = [chip]
        for here in path:
            path += [there for there in self.ends[here] if there not in path]
        for here in path:
            self.ends[here] = []

    def _place_pairs(self) -> None:
        """Pair what is in no block, chips with the fewest partners first."""
        linked = self.mesh.linked
        left = {chip for chip in self.mesh.survivors if not self.ends[chip]}
        partners = {chip: [other for other in linked[chip] if other in left] for chip in left}
        waiting = [(len(partners[chip]), chip) for chip in left]
        heapq.heapify(waiting)
        while waiting:
            known, chip = heapq.heappop(waiting)
            if chip not in left:
                continue
            there = [other for other in partners[chip] if other in left]
            if len(there) != known:
                heapq.heappush(waiting, (len(there), chip))
                continue
            if there:
                other = min(there, key=lambda each: (sum(far in left for far in partners[each]), each))
                self.ends[chip], self.ends[other], self.leader[other] = [other] * 2, [chip] * 2, chip
                left.discard(other)
            left.discard(chip)

    def joined(self) -> _Cover:
        """With cycles joined wherever edges of two lie side by side."""
        width, size = self.mesh.columns, self.mesh.size
        corners = [a for a in range(size - width) if a % width != width - 1]
        again = True
        while again:
            again = False
            for a in corners:
                b, c, d = a + 1, a + width, a + width + 1
                if self.ends[a] and self.ends[d]:
                    again = self._join(a, b, c, d) or self._join(a, c, b, d) or again
        return self

    def _join(self, u: int, v: int, x: int, w: int) -> bool:
        """Put the links u-x and v-w in the place of u-v and x-w, if those are of two cycles."""
        ends = self.ends
        if v not in ends[u] or w not in ends[x] or self.first(u) == self.first(x):
            return False
        for one, old, new in ((u, v, x), (v, u, w), (x, w, u), (w, x, v)):
            ends[one][ends[one].index(old)] = new
        self.leader[self.first(x)] = self.first(u)
        return True

    def first(self, chip: int) -> int:
        """One chip that stands for its cycle."""
        leader = self.leader
        while leader[chip] != chip:
            leader[chip] = leader[leader[chip]]
            chip = leader[chip]
        return chip

    def round(self, start: int) -> list[int]:
        """The chips of a cycle, from this one."""
        found, last, here = [start], start, self.ends[start][0] if self.ends[start] else start
        while here != start:
            found.append(here)
            one, other = self.ends[here]
            last, here = here, other if one == last else one
        return found


def _walked(mesh: Mesh, cover: _Cover) -> Cycle:
    """The cycles walked in one round, each from a chip of another one that it is linked to, and back there.

    A chip may be passed several times, and is in the ring at the first, or, in every other cycle on the way out, at the
    last: so hops stay short however far it goes out (as in Sekanina's proof that the cube of a tree has a cycle).
    """
    hung, depth, start = _hung(mesh, cover)
    walk = list(_walk(cover, hung, start))
    times: dict[int, int] = {}
    for time, chip in enumerate(walk):
        if chip not in times or depth[cover.first(chip)] % 2:
            times[chip] = time
    if len(times) == 1:
        return Cycle((start,), (), (start,))
    order = sorted(times, key=times.__getitem__)  # the first is the start, at time 0
    stops = [*(times[chip] for chip in order), len(walk) - 1]
    routes = tuple(tuple(walk[begin : end + 1]) for begin, end in itertools.pairwise(stops))
    return Cycle(tuple(order), routes, tuple(cover.round(start)))


def _hung(mesh: Mesh, cover: _Cover) -> tuple[dict[int, list[int]], dict[int, int], int]:
    """Chip -> the chips of other cycles that hang on it; a cycle's first chip -> how far out it is; where to start."""
    sizes: dict[int, int] = {}
    for chip in mesh.survivors:
        sizes[cover.first(chip)] = sizes.get(cover.first(chip), 0) + 1
    start = max(sizes, key=lambda first: (sizes[first], -first))
    hung: dict[int, list[int]] = {}
    depth = {start: 0}
    rounds = [cover.round(start)]
    for chips in rounds:
        if len(depth) == len(sizes):
            break
        out = depth[cover.first(chips[0])] + 1
        for chip in chips:
            for other in mesh.linked[chip]:
                if cover.first(other) not in depth:
                    depth[cover.first(other)] = out
                    hung.setdefault(chip, []).append(other)
                    rounds.append(cover.round(other))
    return hung, depth, start


def _walk(cover: _Cover, hung: dict[int, list[int]], start: int) -> Iterator[int]:
    """The chips passed, from the start back to it."""
    stack = [_one_round(cover, start)]
    here: list[int] = []
    while stack:
        chip = next(stack[-1], None)
        if chip is None:
            stack.pop()
            if here:
                yield here.pop()
            continue
        yield chip
        for other in hung.pop(chip, [])[::-1]:
            stack.append(_one_round(cover, other))
            here.append(chip)


def _one_round(cover: _Cover, start: int) -> Iterator[int]:
    chips = cover.round(start)
    yield from chips
    if len(chips) > 1:
        yield start
