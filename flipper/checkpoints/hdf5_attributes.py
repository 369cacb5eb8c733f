"""HDF5 attributes, read with care: libhdf5 can crash over a damaged one whose type is not the expected one."""

from __future__ import annotations

from typing import Any

import numpy as np

from flipper.checkpoints.hdf5_strings import vlen_string_attribute
from flipper.checkpoints.source import Source

LONGEST = 1 << 16
"""Bytes of an attribute; HDF5 itself stores no longer one beside its object."""


def text_attribute(owner: Any, name: str, source: Source, userblock: int) -> str | None:
    """A string attribute of an h5py object; None if there is none of that name, or one that is no single string.

    source, userblock: the file, to read strings of variable length without libhdf5.
    """
    from h5py import h5o, h5t

    attribute = _attribute(owner, name)
    if attribute is None or attribute.get_type().get_class() != h5t.STRING or attribute.shape != ():
        return None
    if attribute.get_type().is_variable_str():
        return vlen_string_attribute(source, userblock, h5o.get_info(owner.id).addr, name.encode())
    value = _read(attribute)
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def shape_attribute(owner: Any, name: str) -> tuple[int, ...] | None:
    """An attribute of an h5py object that is one axis of integers; None if there is none such."""
    from h5py import h5t

    attribute = _attribute(owner, name)
    if attribute is None or attribute.get_type().get_class() != h5t.INTEGER or len(attribute.shape or ()) != 1:
        return None
    return tuple(int(dim) for dim in _read(attribute))


def _attribute(owner: Any, name: str) -> Any:
    """The h5py AttrID of that name; None if there is none, or one too long to be what flipper looks for."""
    from h5py import h5a

    if not h5a.exists(owner.id, name.encode()):
        return None
    attribute = h5a.open(owner.id, name.encode())
    return attribute if attribute.get_storage_size() <= LONGEST else None


def _read(attribute: Any) -> Any:
    data = np.zeros(attribute.shape, attribute.dtype)
    attribute.read(data)
    return data[()]
