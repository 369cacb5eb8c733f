"""Small checkpoints made without flipper, and what may be struck in them counted byte by byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

WIDTHS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I8": 8, "U8": 8, "I32": 32, "I64": 64, "BOOL": 8, "F8_E4M3": 8}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], metadata=None) -> Path:
    """A safetensors file spelled out: {name: (tag, shape, bytes)}, the data in the order given."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (tag, shape, data) in tensors.items():
        header[name] = {"dtype": tag, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return path


def zeros(tag: str, *shape: int) -> tuple[str, list[int], bytes]:
    return tag, list(shape), bytes(WIDTHS[tag] * int(np.prod(shape)) // 8)


def numbers(values, tag: str = "F32") -> tuple[str, list[int], bytes]:
    kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "i1", "I32": "<i4", "I64": "<i8"}[tag]
    array = np.array(values, kind)
    return tag, list(array.shape), array.tobytes()


def small_model(path: Path) -> Path:
    """Layers of very different sizes and widths."""
    rng = np.random.default_rng(4)
    return write_safetensors(
        path,
        {
            "conv1.weight": numbers(rng.standard_normal((4, 3))),
            "conv1.bias": numbers(rng.standard_normal(4)),
            "bn.scale": numbers(rng.standard_normal(3), "F16"),
            "fc.weight": numbers(rng.standard_normal((5, 4)), "F64"),
            "fc.bias": numbers(rng.standard_normal(2)),
        },
    )


def rows(plan) -> list[tuple[str, int, str, int, int | None]]:
    return [(fault.tensor, fault.flat, fault.op, fault.mask, fault.value) for fault in plan]


def bits(plan) -> list[tuple[str, int, int]]:
    """Tensor, element and bit of each fault; each of them strikes one bit."""
    return [(fault.tensor, fault.flat, fault.bits[0]) for fault in plan if len(fault.bits) == 1]
