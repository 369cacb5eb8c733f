"""HDF5 by h5py: contiguous, in chunks, compressed, and with a group for each module, as Chainer writes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from flipper.study.formats.format import OneFile, as_array, as_tensor
from flipper.training.canonical import State

DTYPE: Final = "torch_dtype"
"""Attribute of a dataset whose numbers numpy doesn't have."""


def _flat(name: str) -> str:
    return name


def _grouped(name: str) -> str:
    return name.replace(".", "/")


def _write(settings: Mapping[str, Any], place: Callable[[str], str], state: State, path: Path) -> None:
    """settings: of create_dataset, for tensors of one element or more with an axis; others can't be chunked."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, tensor in state.items():
            array, dtype = as_array(tensor)
            dataset = file.create_dataset(place(name), data=array, **(settings if array.ndim and array.size else {}))
            if dtype is not None:
                dataset.attrs[DTYPE] = dtype


@contextmanager
def _opened(place: Callable[[str], str], path: Path) -> Iterator[Any]:
    import h5py

    with h5py.File(path, "r") as file:

        def read(name: str, box: tuple[slice, ...]) -> Any:
            dataset = file[place(name)]
            return as_tensor(np.asarray(dataset[box]), dataset.attrs.get(DTYPE))

        yield read


def _format(place: Callable[[str], str] = _flat, **settings: Any) -> OneFile:
    return OneFile(functools.partial(_write, settings, place), functools.partial(_opened, place))


PLAIN: Final = _format()
CHUNKED: Final = _format(chunks=True)
GZIP: Final = _format(compression="gzip", compression_opts=4)
CHAINER: Final = _format(_grouped, compression="gzip", compression_opts=4)
