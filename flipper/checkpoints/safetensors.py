"""safetensors: a length, a JSON header, the data; the header's rules are held strictly."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from flipper import bits
from flipper.checkpoints.builders import DIMENSIONS
from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.source import Source
from flipper.checkpoints.structure import decode
from flipper.checkpoints.tensor import Extent, Tensor
from flipper.checkpoints.ties import settle
from flipper.checkpoints.tree import Tree
from flipper.errors import CheckpointError

_SPACES = b" \t\r\n"
"""What may stand around JSON."""

HEADER_LIMIT = 100_000_000
"""Bytes; the library's own limit."""

STRUCTURE_KEY = "flipper_tree"
"""Key in `__metadata__` under which flipper records the structure of a checkpoint that it converted."""

DTYPES = {
    "BOOL": "bool", "F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn",
    "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16",
    "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip


def sniff(source: Source) -> bool:
    """Whether the content begins as a safetensors file does: a plausible length, then a brace."""
    head = source.head(10)
    if len(head) < 10:
        return False
    (length,) = struct.unpack("<Q", head[:8])
    return length <= HEADER_LIMIT and head[8:].lstrip(_SPACES)[:1] in (b"{", b"")


class SafetensorsFile(Checkpoint):
    """One .safetensors file.

    header: the parsed header. metadata: its `__metadata__`, {} if there is none.
    """

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        source = Source(path)
        self.header, data_start = _read_header(source)
        self.metadata: dict[str, str] = _metadata(source, self.header.pop("__metadata__", {}))
        tensors = [_tensor(source, name, entry, data_start) for name, entry in self.header.items()]
        _check_cover(source, self.header, data_start)
        recorded = {alias: name for alias, name in self.metadata.items() if name in self.header}
        super().__init__(path, {"": source}, settle(tensors, recorded))

    def tree(self) -> Tree:
        """The structure that flipper recorded in `__metadata__`; a flat dict of all tensors in other files."""
        record = self.metadata.get(STRUCTURE_KEY)
        return super().tree() if record is None else decode(record)


def read_tensors(source: Source) -> list[Tensor]:
    """The tensors of a safetensors file that fills `source`, by the order of its header."""
    header, data_start = _read_header(source)
    _metadata(source, header.pop("__metadata__", {}))
    tensors = [_tensor(source, name, entry, data_start) for name, entry in header.items()]
    _check_cover(source, header, data_start)
    return tensors


def _broken(source: Source, rule: str) -> CheckpointError:
    return CheckpointError("header", f"{source.path}: safetensors header: {rule}")


def _read_header(source: Source) -> tuple[dict[str, Any], int]:
    if source.size < 8:
        raise CheckpointError("truncated", f"{source.path}: {source.size} bytes hold no safetensors header")
    (length,) = struct.unpack("<Q", source.read(0, 8))
    if length > HEADER_LIMIT:
        raise _broken(source, f"it claims {length} bytes; the limit is {HEADER_LIMIT}")
    text = source.read(8, length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(source, pairs))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _broken(source, f"it is not JSON ({str(error)[:80]})") from error
    if not isinstance(header, dict):
        raise _broken(source, "it is not an object")
    return header, 8 + length


def _unique(source: Source, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _broken(source, f"the key {twice!r} occurs twice")
    return keys


def _metadata(source: Source, metadata: object) -> dict[str, str]:
    if metadata is None:  # as if it weren't there
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(source, "__metadata__ must map strings to strings")
    return metadata


def _tensor(source: Source, name: str, entry: object, data_start: int) -> Tensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise _broken(source, f"{name!r} needs dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise _broken(source, f"{name!r} has the unknown dtype {entry['dtype']!r}")
    shape, span = entry["shape"], entry["data_offsets"]
    if not _naturals(shape) or not _naturals(span) or len(span) != 2 or span[0] > span[1]:
        raise _broken(source, f"{name!r} needs a shape and two ascending offsets of natural numbers")
    if len(shape) > DIMENSIONS:
        raise _broken(source, f"{name!r} has {len(shape)} axes; the limit is {DIMENSIONS}")
    layout = bits.layout(dtype)
    needed, odd = divmod(math.prod(shape) * layout.width * layout.components, 8)
    if odd:
        raise _broken(source, f"{name!r} holds {math.prod(shape)} numbers of {layout.width} bits: no whole bytes")
    if needed != span[1] - span[0]:
        raise _broken(source, f"{name!r} needs {needed} bytes for its shape, its offsets span {span[1] - span[0]}")
    return Tensor(name, dtype, tuple(shape), Extent("", data_start + span[0]))


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_cover(source: Source, header: dict[str, Any], data_start: int) -> None:
    """The tensors follow one another from the first data byte to the last of the file, without hole or overlap."""
    position = 0
    for (begin, end), name in sorted((entry["data_offsets"], name) for name, entry in header.items()):
        if begin != position:
            kind = "a hole" if begin > position else "an overlap"
            raise _broken(source, f"{name!r} begins at byte {begin} of the data, which leaves {kind} at {position}")
        position = end
    left = source.size - data_start - position
    if left < 0:
        raise CheckpointError("truncated", f"{source.path}: the data ends {-left} bytes early")
    if left > 0:
        raise _broken(source, f"{left} bytes follow the last tensor")
