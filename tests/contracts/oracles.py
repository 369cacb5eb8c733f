"""What the contracts know about files without asking flipper: arrays as numbers, read by each format's own library."""

from __future__ import annotations

import io
import json
import math
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

FIELDS = {
    "float64": (64, 11, 52), "float32": (32, 8, 23), "float16": (16, 5, 10), "bfloat16": (16, 8, 7),
    "float8_e4m3fn": (8, 4, 3), "float8_e4m3fnuz": (8, 4, 3), "float8_e5m2": (8, 5, 2), "float8_e5m2fnuz": (8, 5, 2),
    "float6_e2m3fn": (6, 2, 3), "float6_e3m2fn": (6, 3, 2), "float4_e2m1fn": (4, 2, 1),
    "complex128": (64, 11, 52), "complex64": (32, 8, 23), "complex32": (16, 5, 10),
}  # fmt: skip
"""Width of a real number, bits of its exponent and of its mantissa; a sign above both."""

UNSIGNED = {"bool": 8, "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64, "quint8": 8}
SIGNED = {"int8": 8, "int16": 16, "int32": 32, "int64": 64, "qint8": 8}

SAFETENSORS = {
    "BOOL": "bool", "F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn", "U8": "uint8",
    "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I16": "int16",
    "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip


@dataclass(frozen=True)
class Array:
    """dtype and shape as flipper should call them; bits: each real number, row-major, as uint64."""

    dtype: str
    shape: tuple[int, ...]
    bits: np.ndarray[Any, np.dtype[np.uint64]]


def width_of(dtype: str) -> int:
    """Bits of one real number as stored."""
    if dtype == "float8_e8m0fnu":
        return 8
    return FIELDS[dtype][0] if dtype in FIELDS else (UNSIGNED | SIGNED)[dtype]


def field_of(dtype: str, position: int) -> str:
    """The field of a bit, from the table above."""
    if dtype == "float8_e8m0fnu":
        return "exponent"
    if dtype in FIELDS:
        _, exponent, mantissa = FIELDS[dtype]
        return "mantissa" if position < mantissa else "exponent" if position < mantissa + exponent else "sign"
    return "sign" if SIGNED.get(dtype, 0) - 1 == position else "value"


def numbers(data: bytes, width: int, order: str = "little") -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Consecutive numbers of `width` bits in `data`, low bits first where they share bytes."""
    if width >= 8:
        return np.frombuffer(data, f"{'<' if order == 'little' else '>'}u{width // 8}").astype(np.uint64)
    whole = int.from_bytes(data, "little")
    count = 8 * len(data) // width
    return np.array([whole >> (width * i) & ((1 << width) - 1) for i in range(count)], np.uint64)


def torch_array(tensor: torch.Tensor) -> Array:
    """A torch tensor, read by its bytes."""
    tensor = tensor.detach()
    tensor = tensor.int_repr() if tensor.is_quantized else tensor
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    if dtype == "float4_e2m1fn_x2":
        dtype, shape = "float4_e2m1fn", (*shape[:-1], 2 * shape[-1])
    return Array(dtype, shape, numbers(data, width_of(dtype)))


def flat_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of nested dicts and lists under dotted names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from flat_tensors(inner, f"{name}.{key}" if name else str(key))


def read_torch(path: Path) -> dict[str, Array]:
    """What torch.load finds."""
    return {name: torch_array(tensor) for name, tensor in flat_tensors(torch.load(path, weights_only=True))}


def read_torchscript(path: Path) -> dict[str, Array]:
    """What torch.jit.load finds."""
    return {name: torch_array(tensor) for name, tensor in torch.jit.load(path).state_dict().items()}


def read_safetensors(path: Path) -> dict[str, Array]:
    """Header by struct and json, elements by their bytes; the packed dtypes unpacked."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        dtype = SAFETENSORS[entry["dtype"]]
        found[name] = Array(dtype, tuple(entry["shape"]), numbers(data[begin:end], width_of(dtype)))
    return found | {alias: found[name] for alias, name in metadata.items() if name in found and alias not in found}


def read_hdf5(file: Any) -> dict[str, Array]:
    """Every dataset of numbers, read by h5py in the file's own types. file: path or file object."""
    found: dict[str, Array] = {}

    def visit(name: str, thing: Any) -> None:
        numeric = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.ENUM, h5py.h5t.COMPOUND)
        if isinstance(thing, h5py.Dataset) and thing.shape is not None:
            kind = thing.id.get_type()
            if kind.get_class() in numeric:
                found[name] = _hdf5_array(thing, kind)

    with h5py.File(file, "r") as opened:
        opened.visititems(visit)
    return found


def _hdf5_array(dataset: Any, kind: Any) -> Array:
    data = np.zeros(dataset.size * kind.get_size(), np.uint8)
    if dataset.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, data, kind)
    dtype = dataset.dtype
    name = "bool" if dtype == np.bool_ else dtype.newbyteorder("=").name
    if kind.get_class() == h5py.h5t.FLOAT and kind.get_fields()[1:5] == (7, 8, 0, 7):
        name = "bfloat16"
    order = "big" if dtype.byteorder == ">" or (dtype.fields and dtype[0].byteorder == ">") else "little"
    return Array(name, tuple(dataset.shape), numbers(data.tobytes(), width_of(name), order))


def read_keras(path: Path) -> dict[str, Array]:
    """The weights in a .keras archive, unzipped by zipfile and read by h5py."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return read_hdf5(io.BytesIO(archive.read("model.weights.h5")))


def zip_checksum_bytes(data: bytes) -> set[int]:
    """Where the CRCs of all zip records in `data` lie, found by the signatures of the records."""
    places = set()
    for signature, shift in ((b"PK\3\4", 14), (b"PK\1\2", 16), (b"PK\7\10", 4)):
        for match in re.finditer(re.escape(signature), data):
            places.update(range(match.start() + shift, match.start() + shift + 4))
    return places


def files_of(path: Path) -> dict[str, bytes]:
    """The bytes of a checkpoint's files by relative name, "" for a single file."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def changes(before: Mapping[str, Array], after: Mapping[str, Array]) -> dict[tuple[str, int], tuple[int, int]]:
    """(tensor, flat index) -> bits before and after of every element that differs."""
    assert before.keys() == after.keys()
    found = {}
    for name, old in before.items():
        new = after[name]
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        for flat in np.flatnonzero(old.bits != new.bits).tolist():
            found[name, flat] = int(old.bits[flat]), int(new.bits[flat])
    return found


def index_of(flat: int, shape: tuple[int, ...]) -> list[int]:
    """The index of a flat one, by division."""
    index: list[int] = []
    for axis in range(len(shape)):
        step = math.prod(shape[axis + 1 :])
        index.append(flat // step % shape[axis])
    return index
