"""Torch places: where the elements of a tensor lie that a pickle stream describes over a storage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flipper import bits
from flipper.checkpoints.stubs import Storage, StoredTensor
from flipper.checkpoints.tensor import Deflated, Extent, Place, Tensor, Unsupported
from flipper.errors import CheckpointError

EXPANSION_LIMIT = 1 << 24
"""Elements of a view that repeats its storage; larger ones are not streamed."""

_SAME = (
    "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "qint8", "quint8", "qint32", "quint4x2", "quint2x4",
)  # fmt: skip

DTYPES = {
    **{name: (name, 1) for name in _SAME},
    "float4_e2m1fn_x2": ("float4_e2m1fn", 2),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), ("uint8", 1)),
    **{f"{kind}{width}": ("uint8", 1) for kind in ("int", "uint") for width in range(1, 8)},
    "bits16": ("uint16", 1),
}
"""torch's dtype -> flipper's, and how many of its elements one of torch's is."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where the bytes of a storage are.

    file: "" in a single file. start, size: in bytes. order: "little" or "big".
    entry: the name of the archive entry to inflate, in which `start` counts; None where the bytes lie plain.
    """

    file: str
    start: int
    size: int
    order: str
    entry: str | None = None


def settle_tensor(name: str, stored: StoredTensor, home_of: Callable[[Storage], Home], where: str) -> Tensor:
    """The tensor that `stored` describes, under `name`.

    home_of: finds a storage. where: names the file in messages.
    Raises CheckpointError("header") when it reaches beyond its storage, or has no end.
    """
    if math.prod(stored.shape) >= 1 << 62:
        raise CheckpointError("header", f"{where}: {name} has the impossible shape {list(stored.shape)}")
    known = DTYPES.get(stored.dtype)
    if stored.storage is None or stored.reason is not None or known is None:
        unknown = f"flipper does not know the dtype {stored.dtype[:40]}"
        return Tensor(name, stored.dtype[:40], stored.shape, Unsupported("", stored.reason or unknown))
    home = home_of(stored.storage)
    dtype, split = known
    layout = bits.layout(dtype)
    unit = layout.width * layout.components * split
    start = _check_reach(name, stored, stored.storage, unit, home, where)
    shape = stored.shape if split == 1 or not stored.shape else (*stored.shape[:-1], stored.shape[-1] * split)
    strides = _real_strides(stored, layout.components, split)
    obstacle = _obstacle(stored, start, strides, home)
    if obstacle is not None:
        return Tensor(name, dtype, shape, Unsupported(home.file, obstacle))
    extent = Extent(home.file, home.start + start // 8, home.order, strides or None)
    place: Place = extent if home.entry is None else Deflated(home.file, "deflated", home.entry, extent)
    return Tensor(name, dtype, shape, place)


def _check_reach(name: str, stored: StoredTensor, storage: Storage, unit: int, home: Home, where: str) -> int:
    """The first bit of the tensor in its storage; unit: bits of one of torch's elements."""
    item = item_bytes(storage)
    first, last = storage.first * item, (storage.first + storage.count) * item
    if last > home.size:
        message = f"storage {storage.key[:40]} should have {last} bytes, the file has {home.size}"
        raise CheckpointError("header", f"{where}: {message}")
    start = first * 8 + stored.offset * unit
    reach = sum((length - 1) * stride for length, stride in zip(stored.shape, stored.strides, strict=True))
    if math.prod(stored.shape) and start + (reach + 1) * unit > last * 8:
        raise CheckpointError("header", f"{where}: {name} reaches beyond the end of storage {storage.key[:40]}")
    return start


def item_bytes(storage: Storage) -> int:
    """Bytes that one counted element of a storage takes."""
    if storage.dtype is None:
        return 1
    layout = bits.layout(DTYPES[storage.dtype][0])
    return max(layout.width * layout.components // 8, 1)


def _real_strides(stored: StoredTensor, components: int, split: int) -> tuple[int, ...] | None:
    """Strides in real numbers over Tensor.dims; () when row-major, None when they can't be said so."""
    expected, contiguous = 1, True
    for length, stride in zip(reversed(stored.shape), reversed(stored.strides), strict=True):
        contiguous = contiguous and (length == 1 or stride == expected)
        expected *= length
    if contiguous or expected == 0:
        return ()
    if components == 2:
        return (*(2 * stride for stride in stored.strides), 1)
    if split == 1:
        return stored.strides
    if stored.strides[-1] != 1 and stored.shape[-1] != 1:
        return None
    return (*(split * stride for stride in stored.strides[:-1]), 1)


def _obstacle(stored: StoredTensor, start: int, strides: tuple[int, ...] | None, home: Home) -> str | None:
    """Why the tensor can't be struck although its bytes are there, else None."""
    if strides is None:
        return "a packed tensor whose last axis is not contiguous"
    if start % 8:
        return "a packed tensor that begins inside a byte"
    elements = math.prod(stored.shape)
    if elements > EXPANSION_LIMIT and elements > 64 * home.size:
        return f"an expanded view of {elements} elements over {home.size} bytes"
    if not stored.shape and DTYPES[stored.dtype][1] > 1:
        return "a packed tensor without an axis"
    return None
