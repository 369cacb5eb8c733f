"""flipper's own layout for a state in HDF5, `flipper-state/1`: h5py reads its tensors as arrays, flipper all of it.

    /                   attribute flipper_layout = "flipper-state/1"
    /flipper_tree       scalar string: the structure as JSON (see structure.py); scalars stand in it; may be missing
    /<key>/<key>/...    one contiguous little-endian dataset for each tensor

A path is a name with slashes for its dots, each component escaped: `name_of` gives the name back. Where nested keys
don't spell the names, or two would need one path, all tensors stand in the root group under their full names, escaped.
Names tied to one tensor are hard links to one dataset.

bfloat16 and 8-bit floats are custom float types, bool is h5py's enumeration, complex numbers are h5py's compound of r
and i. HDF5 knows IEEE's infinities only, so other readers misread the largest 8-bit floats. A dataset whose type
doesn't say its dtype has the attribute `flipper_dtype`; dtypes that HDF5 can't spell at all are uint8, and packed ones,
one axis of bytes, state their shape in elements in `flipper_shape` too.
"""

from __future__ import annotations

import re
from typing import Final

MARK: Final = "flipper-state/1"
MARK_ATTRIBUTE: Final = "flipper_layout"
TREE_DATASET: Final = "flipper_tree"
DTYPE_ATTRIBUTE: Final = "flipper_dtype"
SHAPE_ATTRIBUTE: Final = "flipper_shape"


def escape(component: str) -> str:
    """A key as one component of an HDF5 path: percent signs for slashes, NUL, lone surrogates, "." and emptiness."""
    if component == "":
        return "%"
    if component in (".", TREE_DATASET):
        return f"%{ord(component[0]):02X}{component[1:]}"
    return re.sub("[/%\0\ud800-\udfff]", _percent, component)


def name_of(path: str) -> str:
    """The name of the tensor at an HDF5 path without a slash in front."""
    return ".".join(_unescape(component) for component in path.split("/"))


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def _unescape(component: str) -> str:
    if component == "%":
        return ""
    try:
        return re.sub("(?:%[0-9A-F]{2})+", _plain, component)
    except UnicodeDecodeError:  # nothing that `escape` made
        return component


def _plain(match: re.Match[str]) -> str:
    return bytes.fromhex(match[0].replace("%", "")).decode("utf-8", "surrogatepass")
