"""Write a state in HDF5, in the layout that hdf5_layout.py describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flipper import bits
from flipper.checkpoints.hdf5_layout import (
    DTYPE_ATTRIBUTE,
    MARK,
    MARK_ATTRIBUTE,
    SHAPE_ATTRIBUTE,
    TREE_DATASET,
    escape,
)
from flipper.checkpoints.structure import encode
from flipper.checkpoints.writers.contents import Contents, TensorData
from flipper.errors import UsageError

Place = tuple[str, ...]


def write(contents: Contents, path: Path) -> None:
    """Write `contents` to the file `path`; raises UsageError, before it writes, for what the format can't hold.

    h5py lays out the file without data; the data is written where the datasets lie, past all conversions.
    """
    for name, data in contents.tensors.items():
        if data.dtype.startswith(("qint", "quint")):
            raise UsageError(f"{name} is {data.dtype}, whose scale HDF5 has no place for")
    record = encode(contents.tree)
    places = _places(contents)
    try:
        starts = _lay_out(contents, path, places, record)
    except RuntimeError as error:  # what h5py raises when closing fails
        raise OSError(str(error)) from error
    with path.open("r+b") as file:
        for name, start in starts.items():
            file.seek(start)
            for block in contents.tensors[name].blocks():
                file.write(block)


def _places(contents: Contents) -> dict[str, Place]:
    """Where each name stands: at its nested keys if they spell every name and no two get in each other's way."""
    nested: dict[str, Place] = {}
    for keys, leaf in contents.leaves():
        spelled = tuple(map(str, keys))
        if ".".join(spelled) == leaf.name:
            nested[leaf.name] = tuple(map(escape, spelled))
    names = {*contents.tensors, *contents.aliases}
    taken = set(nested.values())
    groups = {place[:depth] for place in taken for depth in range(1, len(place))}
    if nested.keys() == names and len(taken) == len(names) and not taken & groups:
        return nested
    return {name: (escape(name),) for name in sorted(names)}


def _lay_out(contents: Contents, path: Path, places: dict[str, Place], record: str) -> dict[str, int]:
    """Create the file with room for all data; returns the byte at which each tensor's begins."""
    import h5py

    starts = {}
    with h5py.File(path, "w") as file:
        file.attrs[MARK_ATTRIBUTE] = MARK
        file.create_dataset(TREE_DATASET, data=np.bytes_(record.encode("ascii")))
        for name, place in places.items():
            if name in contents.tensors:
                dataset = _create(file, "/".join(place), contents.tensors[name])
                if contents.tensors[name].nbytes:
                    starts[name] = dataset.id.get_offset()
        for alias, name in contents.aliases.items():
            file["/".join(places[alias])] = file["/".join(places[name])]
    return starts


def _create(file: Any, path: str, data: TensorData) -> Any:
    from h5py import Dataset, h5d, h5p, h5s

    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(h5d.CONTIGUOUS)
    properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)  # the same contents give the same bytes at any time
    links = h5p.create(h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(1)  # UTF-8
    shape = (data.nbytes,) if data.layout.packed else data.shape
    space = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
    datatype, says_all = _datatype(data.dtype)
    dataset = Dataset(h5d.create(file.id, path.encode(), datatype, space, properties, links))
    if not says_all:
        dataset.attrs[DTYPE_ATTRIBUTE] = data.dtype
    if data.layout.packed:
        dataset.attrs[SHAPE_ATTRIBUTE] = np.array(data.shape, np.int64)
    return dataset


def _datatype(dtype: str) -> tuple[Any, bool]:
    """The HDF5 type of a dtype's elements, and whether it says the dtype to any reader."""
    from h5py import h5t

    layout = bits.layout(dtype)
    if layout.packed or dtype == "float8_e8m0fnu":
        return h5t.py_create(np.dtype(np.uint8)), False
    if layout.components == 2:
        part = np.dtype(f"<f{layout.itemsize}")
        return h5t.py_create(np.dtype([("r", part), ("i", part)])), True
    if layout.kind != "float" or dtype in ("float16", "float32", "float64"):
        return h5t.py_create(np.dtype(dtype).newbyteorder("<"), logical=True), True
    custom = h5t.IEEE_F32LE.copy()
    custom.set_fields(layout.width - 1, layout.mantissa, layout.exponent, 0, layout.mantissa)
    custom.set_ebias(layout.bias)
    custom.set_precision(layout.width)
    custom.set_size(layout.itemsize)
    return custom, dtype == "bfloat16"
