"""The formats that checkpoints are measured in, each as its own library writes and reads it; found without importing.

Each is an object with the methods of `Format` in format.py, in the module and under the name that stand here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from flipper.errors import UsageError

if TYPE_CHECKING:
    from flipper.study.formats.format import Format


@dataclass(frozen=True)
class Entry:
    """Where a format is, and what is known of it without torch.

    sharded: each rank writes what it holds. asynchronous: it can be saved while training goes on.
    needs: a package beside flipper's own.
    """

    module: str
    attribute: str
    summary: str
    sharded: bool = False
    asynchronous: bool = False
    needs: str | None = None


FORMATS: Final = {
    "pytorch": Entry("one_file", "PYTORCH", "torch.save and torch.load"),
    "safetensors": Entry("one_file", "SAFETENSORS", "safetensors.torch.save_file; each rank reads what it holds"),
    "npz": Entry("one_file", "NPZ", "numpy.savez"),
    "npz-deflate": Entry("one_file", "NPZ_DEFLATE", "numpy.savez_compressed, as Chainer's save_npz"),
    "hdf5": Entry("hdf5", "PLAIN", "h5py, contiguous; each rank reads what it holds"),
    "hdf5-chunked": Entry("hdf5", "CHUNKED", "h5py, in chunks of h5py's choice"),
    "hdf5-gzip": Entry("hdf5", "GZIP", "h5py, in chunks, compressed by gzip at level 4"),
    "hdf5-chainer": Entry("hdf5", "CHAINER", "a group for each module, compressed, as Chainer's save_hdf5"),
    "keras": Entry("keras", "WEIGHTS", "a Keras model's save_weights and load_weights (.weights.h5)", needs="keras"),
    "dcp": Entry("dcp", "DCP", "torch.distributed.checkpoint", sharded=True, asynchronous=True),
    "safetensors-sharded": Entry(
        "dcp", "SAFETENSORS", "torch.distributed.checkpoint in files of safetensors", sharded=True
    ),
}


def check_installed(name: str) -> None:
    """Raise UsageError when a format needs a package that isn't installed."""
    needed = FORMATS[name].needs
    if needed is not None and find_spec(needed) is None:
        raise UsageError(f"--formats {name} needs {needed}, which is not installed; pip install {needed}")


def get(name: str) -> Format:
    """The format of this name; imports its library, and torch."""
    entry = FORMATS[name]
    found: Format = getattr(import_module(f"{__name__}.{entry.module}"), entry.attribute)
    return found
