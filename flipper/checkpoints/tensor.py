"""Tensor: a named array of a checkpoint, and the places where its bytes can lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from flipper import bits
from flipper.bits import BitLayout
from flipper.checkpoints.elements import Int


@dataclass(frozen=True)
class Located:
    """Where some elements lie in one file.

    file: relative to a directory checkpoint; "" in a single file.
    where: which of the elements that were asked for these are.
    offsets: byte of the file at which each begins. shifts: first bit in that byte; None unless packed.
    order: "little" or "big".
    """

    file: str
    where: slice | Int
    offsets: Int
    order: str
    shifts: Int | None = None


class Place(Protocol):
    """Where the bytes of a tensor are.

    storage: the word that `inspect` shows. reason: why it can't be struck, else None.
    offset: first byte when the elements lie row-major in one run of bytes, else None.
    patchable: whether `locate` works; if not, the checkpoint itself reads and rewrites (filtered chunks).
    """

    @property
    def file(self) -> str: ...
    @property
    def storage(self) -> str: ...
    @property
    def offset(self) -> int | None: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def patchable(self) -> bool: ...

    def locate(self, dims: tuple[int, ...], layout: BitLayout, flat: Int) -> Iterator[Located]: ...


@dataclass(frozen=True)
class Extent:
    """One run of bytes, patched in place.

    start: byte of element 0. strides: elements to step along each of the tensor's `dims`; None when row-major.
    """

    file: str
    start: int
    order: str = "little"
    strides: tuple[int, ...] | None = None
    reason: None = field(default=None, init=False)
    patchable: bool = field(default=True, init=False)

    @property
    def storage(self) -> str:
        return "plain" if self.strides is None else "strided"

    @property
    def offset(self) -> int | None:
        return self.start if self.strides is None else None

    def locate(self, dims: tuple[int, ...], layout: BitLayout, flat: Int) -> Iterator[Located]:
        steps = flat
        if self.strides:
            steps = np.zeros(len(flat), np.int64)
            # Axes of length 1 can have any stride and be any number; numpy unravels 32 of them, or 64.
            axes = [(size, stride) for size, stride in zip(dims, self.strides, strict=True) if size != 1]
            indexes = np.unravel_index(flat, [size for size, _ in axes]) if axes else ()
            for index, (_, stride) in zip(indexes, axes, strict=True):
                steps += index * stride
        if layout.packed:
            bit = steps * layout.width
            yield Located(self.file, slice(None), self.start + bit // 8, self.order, bit % 8)
        else:
            yield Located(self.file, slice(None), self.start + steps * layout.itemsize, self.order)


@dataclass(frozen=True)
class Boxed:
    """Bytes inside something that has to be rewritten whole: a filtered chunk, a deflated archive entry.

    storage: "filtered", "compact", "deflated" ... ; the checkpoint's read_bits and rewrite deal with it.
    """

    file: str
    storage: str
    offset: None = field(default=None, init=False)
    reason: None = field(default=None, init=False)
    patchable: bool = field(default=False, init=False)

    def locate(self, dims: tuple[int, ...], layout: BitLayout, flat: Int) -> Iterator[Located]:
        raise TypeError(f"{self.storage} bytes have no place of their own")


@dataclass(frozen=True)
class Deflated(Boxed):
    """Bytes inside a deflated archive entry. inside: where they lie once it is inflated."""

    entry: str
    inside: Extent


def run_of(place: Place) -> tuple[tuple[str, str], Extent] | None:
    """The space in which a place is one run of bytes (a file, and an entry of it if need be), and the run.

    None for places of other kinds. Two runs share bytes only in one space.
    """
    if isinstance(place, Extent):
        return (place.file, ""), place
    return ((place.file, place.entry), place.inside) if isinstance(place, Deflated) else None


@dataclass(frozen=True)
class Unsupported:
    """Bytes that flipper can't strike, and why; listed by `inspect`, never in a population."""

    file: str
    reason: str
    offset: None = field(default=None, init=False)
    storage: str = field(default="unsupported", init=False)
    patchable: bool = field(default=False, init=False)

    def locate(self, dims: tuple[int, ...], layout: BitLayout, flat: Int) -> Iterator[Located]:
        raise TypeError(self.reason)


@dataclass(frozen=True)
class Tensor:
    """A named array in a checkpoint.

    dtype: canonical name (see flipper.bits); any text when `place` is Unsupported.
    shape: in elements of the container, packed dtypes unpacked. role: parameter, buffer, optimizer or other.
    aliases: other names of the same bytes, by code point; `name` comes before all of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: Place
    role: str = "parameter"
    aliases: tuple[str, ...] = ()

    @property
    def layout(self) -> BitLayout:
        """What the bits of an element mean; only for supported tensors."""
        return bits.layout(self.dtype)

    @property
    def supported(self) -> bool:
        """Whether its elements can be read and struck."""
        return self.place.reason is None

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The shape in real numbers: a complex dtype has a trailing axis of 2."""
        complex_axis = (2,) if self.supported and self.layout.components == 2 else ()
        return self.shape + complex_axis

    @cached_property
    def elements(self) -> int:
        """How many real numbers it holds."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes that its elements need, packed dtypes rounded up; 0 when unsupported."""
        return (self.elements * self.layout.width + 7) // 8 if self.supported else 0

    @property
    def layer(self) -> str:
        """The module that owns it: the name without its last component."""
        cut = max(self.name.rfind("."), self.name.rfind("/"))
        return self.name[:cut] if cut > 0 else self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and all its aliases."""
        return (self.name, *self.aliases)

    def located_in(self, folder_file: str) -> Tensor:
        """The same tensor as part of a directory checkpoint, in the file `folder_file` of it."""
        return replace(self, place=replace(self.place, file=folder_file))  # type: ignore[type-var]
