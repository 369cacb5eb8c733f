"""The index of an HDF5 file: every dataset as a tensor, with the place of its bytes; no data is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flipper.checkpoints.hdf5_types import ElementType, element_type
from flipper.checkpoints.hdf5_walk import Path, walk
from flipper.checkpoints.tensor import Boxed, Extent, Place, Tensor, Unsupported


@dataclass(frozen=True)
class Index:
    """What a file holds.

    tensors: one a dataset, and unsupported rows for links that lead elsewhere. aliases: other paths -> first path.
    """

    tensors: list[Tensor]
    aliases: dict[str, str]


def read_index(file: Any) -> Index:
    """Index an h5py.File."""
    from h5py import h5d

    found = walk(file.id)
    tensors, aliases = [], {}
    for paths in found.datasets.values():
        name, *others = sorted(_name(path) for path in paths)
        aliases.update(dict.fromkeys(others, name))
        tensors.append(_tensor(name, h5d.open(file.id, b"/".join(paths[0]))))
    for path, target in found.elsewhere.items():
        tensors.append(Tensor(_name(path), "link", (0,), Unsupported("", target)))
    return Index(tensors, aliases)


def _name(path: Path) -> str:
    return b"/".join(path).decode("utf-8", "backslashreplace")


def _tensor(name: str, dataset: Any) -> Tensor:
    kind = element_type(dataset.get_type())
    shape = dataset.shape
    if shape is None:
        return Tensor(name, kind.dtype, (0,), Unsupported("", "an empty dataspace: there is no element"))
    if kind.reason is not None:
        return Tensor(name, kind.dtype, shape, Unsupported("", kind.reason))
    return Tensor(name, kind.dtype, shape, _place(dataset, kind, shape))


def _place(dataset: Any, kind: ElementType, shape: tuple[int, ...]) -> Place:
    from h5py import h5d

    layout = dataset.get_create_plist().get_layout()
    if not math.prod(shape):
        return Boxed("", "empty")
    if layout == h5d.CONTIGUOUS and dataset.get_storage_size() and dataset.get_offset() is not None:
        return Extent("", dataset.get_offset(), kind.order)
    return Unsupported("", "its storage is not contiguous")
