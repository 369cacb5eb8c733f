"""Write PyTorch's zip as torch.save does: data.pkl, and one stored entry, aligned to 64 bytes, for each tensor.

Names tied to one tensor share its storage, and so stay tied when loaded. A tensor's name is its keys, joined by dots.
Checksums are real ones, in the local headers and in the central directory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Final
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from flipper.checkpoints.pickled_tree import BARE, join
from flipper.checkpoints.structure import Keys
from flipper.checkpoints.tree import Leaf
from flipper.checkpoints.writers.contents import Buffer, Contents, TensorData
from flipper.checkpoints.writers.pickler import Pickler
from flipper.errors import UsageError

STORAGES: Final = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}  # fmt: skip
"""dtype -> torch's storage class; such tensors are rebuilt by _rebuild_tensor_v2."""

UNTYPED: Final = {
    "complex32": "complex32", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
    "float8_e4m3fn": "float8_e4m3fn", "float8_e4m3fnuz": "float8_e4m3fnuz", "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2fnuz", "float8_e8m0fnu": "float8_e8m0fnu", "float4_e2m1fn": "float4_e2m1fn_x2",
}  # fmt: skip
"""dtype -> name in torch of the newer dtypes, whose storages are untyped; rebuilt by _rebuild_tensor_v3."""

ALIGNMENT: Final = 64
ZIP64_FROM: Final = 1 << 30
"""Bytes from which an entry gets 64-bit sizes; below zipfile's own limit, so that the header's length is known."""


def write(contents: Contents, path: Path) -> None:
    """Write `contents` to the file `path`; raises UsageError, before it writes, for what the format can't hold."""
    keys = {name: str(number) for number, name in enumerate(contents.tensors)}
    pickle = Pickler(lambda pickler, leaf: _leaf(pickler, leaf, contents, keys)).dump(contents.spelled(_name))
    with path.open("wb") as file, ZipFile(file, "w", ZIP_STORED) as archive:
        _entry(archive, "data.pkl", len(pickle), [pickle])
        _entry(archive, "byteorder", 6, [b"little"])
        for name, key in keys.items():
            data = contents.tensors[name]
            _entry(archive, f"data/{key}", data.nbytes, data.blocks())
        _entry(archive, "version", 2, [b"3\n"])


def _name(keys: Keys) -> str:
    """The name that reading gives to the tensor at `keys`."""
    return reduce(join, keys, "") or BARE


def _entry(archive: ZipFile, name: str, size: int, blocks: Iterable[Buffer]) -> None:
    info = ZipInfo(f"archive/{name}")
    info.file_size = size
    large = size >= ZIP64_FROM
    start = archive.start_dir + 30 + len(info.filename) + 4 + (20 if large else 0)
    padding = -start % ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=large) as entry:
        for block in blocks:
            entry.write(block)


def _leaf(pickler: Pickler, leaf: Leaf, contents: Contents, keys: dict[str, str]) -> None:
    name = contents.owner(leaf.name)
    data = contents.tensors[name]
    if not leaf.parameter:
        _tensor(pickler, name, data, keys[name])
        return

    def arguments() -> None:
        _tensor(pickler, name, data, keys[name])
        pickler.value(data.layout.real and not leaf.frozen)  # requires_grad: torch allows it for such dtypes only
        _no_hooks(pickler)

    pickler.call("torch._utils", "_rebuild_parameter", arguments)


def _tensor(pickler: Pickler, name: str, data: TensorData, key: str) -> None:
    typed = data.dtype in STORAGES
    shape = _torch_shape(name, data)

    def arguments() -> None:
        _storage(pickler, data, key)
        pickler.value(0)
        pickler.value(shape)
        pickler.value(_strides(shape))
        pickler.value(False)
        _no_hooks(pickler)
        if not typed:
            pickler.reference("torch", UNTYPED[data.dtype])

    pickler.call("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3", arguments)


def _storage(pickler: Pickler, data: TensorData, key: str) -> None:
    """Push the storage: a persistent id of its class, key, device and size (in elements; in bytes when untyped)."""
    pickler.emit(b"(")
    pickler.value("storage")
    if data.dtype in STORAGES:
        pickler.reference("torch", STORAGES[data.dtype])
    else:
        pickler.reference("torch.storage", "UntypedStorage")
    pickler.value(key)
    pickler.value("cpu")
    pickler.value(data.elements if data.dtype in STORAGES else data.nbytes)
    pickler.emit(b"tQ")


def _no_hooks(pickler: Pickler) -> None:
    pickler.call("collections", "OrderedDict", lambda: None)


def _torch_shape(name: str, data: TensorData) -> tuple[int, ...]:
    """The shape as torch counts: packed numbers by the byte, along the last axis."""
    if data.dtype in STORAGES or (data.dtype in UNTYPED and not data.layout.packed):
        return data.shape
    if data.dtype not in UNTYPED:
        raise UsageError(f"{name} is {data.dtype}, which PyTorch can't hold; try --to hdf5")
    if not data.shape or data.shape[-1] % 2:
        raise UsageError(f"{name}: PyTorch holds {data.dtype} in pairs, its last axis is odd; try --to hdf5")
    return (*data.shape[:-1], data.shape[-1] // 2)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
