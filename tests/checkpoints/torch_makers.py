"""Small PyTorch files for tests, and oracles that know nothing of flipper's readers."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool", "int8", "int16",
    "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits (a bool of zeros and ones)."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    if kind is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    width = torch.empty((), dtype=kind).element_size()
    raw = torch.randint(0, 256, (*shape, width), dtype=torch.uint8, generator=generator)
    return raw.view(kind).reshape(shape)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's elements in row-major order as numbers, real and imaginary part apart; by torch and numpy alone."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    components = 2 if tensor.is_complex() else 1
    width = tensor.element_size() // components
    raw = tensor.contiguous().reshape(-1).clone().untyped_storage()
    data = bytes(raw)[: tensor.numel() * width * components]
    return np.frombuffer(data, f"<u{width}").astype(np.uint64)


def flat_names(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of nested dicts, lists and tuples under their dotted names."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    found: dict[str, torch.Tensor] = {}
    for key, inner in items:
        found.update(flat_names(inner, f"{name}.{key}" if name else str(key)))
    return found


def training_state() -> dict[str, Any]:
    """A model that was trained for two steps, its Adam state, and counters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2, "best": 0.5, "tag": "x"}


def saved_bytes(value: Any, legacy: bool = False) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def deflated(source: Path, target: Path) -> Path:
    """The archive written anew by zipfile, all entries deflated but those of code."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
    return target
