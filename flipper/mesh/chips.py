"""Chips: a mesh of rows and columns in which each is linked to its four neighbours, and some have failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from flipper.errors import UsageError

Ints = npt.NDArray[np.int64]
Route = tuple[int, ...]
"""The chips that a message passes, from the one that sends it to the one that it is for."""

LARGEST: Final = 256
"""Rows, and columns, at most: a schedule has a lane for each chip and direction."""

STEPS: Final = {(0, 1): 0, (0, -1): 1, (1, 0): 2, (-1, 0): 3}
"""(rows, columns) of a step to a neighbour -> the number of that link: east, west, south, north."""

_SHAPE: Final = re.compile(r"(\d{1,6})[xX](\d{1,6})")
_HOLE: Final = re.compile(r"(?:(\d{1,6})[xX](\d{1,6})@)?(\d{1,6}),(\d{1,6})")


@dataclass(frozen=True)
class Hole:
    """A block of failed chips, whose first one stands at (row, column), both counted from 0."""

    rows: int
    columns: int
    row: int
    column: int

    @classmethod
    def parse(cls, text: str) -> Hole:
        """Read `r,c`, one chip, or `HxW@r,c`, a block; UsageError says what is allowed."""
        found = _HOLE.fullmatch(text.strip())
        if found is None:
            raise UsageError(f"--failed {text!r}: say which chip, as 4,6 (row, column), or which block, as 2x2@4,6")
        rows, columns = int(found[1] or 1), int(found[2] or 1)
        if not rows or not columns:
            raise UsageError(f"--failed {text!r}: a block has one row and one column at least")
        return cls(rows, columns, int(found[3]), int(found[4]))

    def __str__(self) -> str:
        size = "" if self.rows == self.columns == 1 else f"{self.rows}x{self.columns}@"
        return f"{size}{self.row},{self.column}"


@dataclass(frozen=True)
class Mesh:
    """A mesh without links round its edges. A chip's number is row * columns + column.

    failed: numbers of chips that take no part and pass nothing on.
    """

    rows: int
    columns: int
    failed: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, shape: str, holes: Iterable[str | Hole] = ()) -> Mesh:
        """Read `RxC`, with holes as Hole.parse reads them. UsageError: a wrong shape, or a hole that isn't in it."""
        found = _SHAPE.fullmatch(shape.strip())
        if found is None or not (1 <= int(found[1]) <= LARGEST and 1 <= int(found[2]) <= LARGEST):
            raise UsageError(f"no mesh {shape!r}: give rows x columns, as 16x32; at most {LARGEST} of each")
        mesh = cls(int(found[1]), int(found[2]))
        return mesh.with_holes(Hole.parse(each) if isinstance(each, str) else each for each in holes)

    def with_holes(self, holes: Iterable[Hole]) -> Mesh:
        """The mesh with these failed, too. Raises UsageError for what it hasn't, and when nobody is left."""
        failed = set(self.failed)
        for hole in holes:
            if hole.row + hole.rows > self.rows or hole.column + hole.columns > self.columns:
                raise UsageError(
                    f"--failed {hole}: a mesh of {self.rows}x{self.columns} has rows 0 to {self.rows - 1} and columns "
                    f"0 to {self.columns - 1}"
                )
            failed.update(
                (hole.row + row) * self.columns + hole.column + column
                for row in range(hole.rows)
                for column in range(hole.columns)
            )
        if len(failed) == self.size:
            raise UsageError(f"all {self.size} chips of the mesh have failed; leave one that lives")
        return Mesh(self.rows, self.columns, frozenset(failed))

    def without(self, chips: Iterable[int]) -> Mesh:
        """The mesh with these chips failed, too, by number."""
        return Mesh(self.rows, self.columns, self.failed | frozenset(chips))

    @property
    def shape(self) -> str:
        """As it is written."""
        return f"{self.rows}x{self.columns}"

    @property
    def size(self) -> int:
        """Chips, failed ones among them."""
        return self.rows * self.columns

    @cached_property
    def alive(self) -> npt.NDArray[np.bool_]:
        """Whether each chip lives, [size]."""
        alive = np.ones(self.size, dtype=np.bool_)
        alive[list(self.failed)] = False
        return alive

    @cached_property
    def survivors(self) -> tuple[int, ...]:
        """The chips that live, row by row: the order in which ranks are given to them."""
        return tuple(np.flatnonzero(self.alive).tolist())

    def place(self, chip: int) -> tuple[int, int]:
        """Row and column."""
        return divmod(chip, self.columns)

    @property
    def turns(self) -> dict[int, int]:
        """Difference between the numbers of neighbours -> the direction of their link; see STEPS."""
        return {1: 0, -1: 1, self.columns: 2, -self.columns: 3}  # a mesh of one column has links south and north only

    @cached_property
    def linked(self) -> tuple[tuple[int, ...], ...]:
        """The neighbours that live of each chip that lives: east, west, south, north of it."""
        return tuple(tuple(self._neighbours(chip)) if self.alive[chip] else () for chip in range(self.size))

    def _neighbours(self, chip: int) -> Iterator[int]:
        row, column = self.place(chip)
        for down, right in STEPS:
            if 0 <= row + down < self.rows and 0 <= column + right < self.columns:
                other = chip + down * self.columns + right
                if self.alive[other]:
                    yield other

    def parts(self) -> list[list[int]]:
        """The survivors in connected parts, the largest first."""
        seen: set[int] = set()
        found = []
        for chip in self.survivors:
            if chip in seen:
                continue
            seen.add(chip)
            part = [chip]
            for each in part:
                fresh = [other for other in self.linked[each] if other not in seen]
                seen.update(fresh)
                part += fresh
            found.append(part)
        return sorted(found, key=len, reverse=True)

    def refuse_parts(self) -> None:
        """Raise UsageError when some survivors are cut off from the others."""
        parts = self.parts()
        if len(parts) > 1:
            row, column = self.place(parts[-1][0])
            raise UsageError(
                f"no scheme serves this mesh: {len(parts[-1])} of {len(self.survivors)} survivors are cut off from the "
                f"others, as the chip at {row},{column} is"
            )

    @cached_property
    def transposed(self) -> Mesh:
        """Rows and columns exchanged."""
        return Mesh(self.columns, self.rows, frozenset(self.transpose(list(self.failed)).tolist()))

    def transpose(self, chips: Sequence[int] | Ints) -> Ints:
        """The numbers of chips in the transposed mesh."""
        row, column = np.divmod(np.asarray(chips, dtype=np.int64), self.columns)
        return np.asarray(column * self.rows + row, dtype=np.int64)
