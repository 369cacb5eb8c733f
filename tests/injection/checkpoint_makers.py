"""Small files for the injection tests, and plans for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from safetensors.numpy import save_file

from flipper.checkpoints import open_checkpoint
from flipper.faults.draw import draw
from flipper.faults.effects import FLIP, WRITE
from flipper.faults.model import FaultModel
from flipper.faults.plan import FaultPlan, Target, plan_of


def noise(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def safetensors_file(folder: Path, elements: int = 4000) -> Path:
    """Two tensors of float32."""
    path = folder / "model.safetensors"
    save_file({"a.weight": noise(elements), "b.weight": noise(elements, seed=1)}, path)
    return path


def torch_file(folder: Path, elements: int = 4000) -> Path:
    """A PyTorch archive with CRCs."""
    import torch

    path = folder / "model.pt"
    torch.save({"a.weight": torch.from_numpy(noise(elements)), "b.weight": torch.from_numpy(noise(elements))}, path)
    return path


def gzip_file(folder: Path) -> Path:
    """Gzip chunks that compress well until they are struck, so that they have to move and the file grows."""
    path = folder / "model.h5"
    with h5py.File(path, "w") as file:
        for name in ("a", "b"):
            file.create_dataset(f"{name}/weight", data=np.ones((40, 50), "f4"), chunks=(10, 50), compression="gzip")
        file["plain"] = noise(500)
    return path


def drawn(path: Path, seed: int = 1, **options: Any) -> FaultPlan:
    """A plan drawn for a file."""
    with open_checkpoint(path) as checkpoint:
        return draw(checkpoint, FaultModel(**options), seed)


def listed(name: str, *rows: tuple[int, str, int, int]) -> FaultPlan:
    """A plan of rows (flat, "flip" or "write", mask, value) in one tensor."""
    ops = {"flip": FLIP, "write": WRITE}
    return plan_of([Target(name)], [(0, flat, ops[op], mask, value) for flat, op, mask, value in rows])


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
