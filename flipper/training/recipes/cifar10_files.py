"""Reads CIFAR-10's python version (https://www.cs.toronto.edu/~kriz/cifar.html); nothing in its pickles runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from flipper.checkpoints.pickle_operations import Ended
from flipper.checkpoints.pickles import Machine
from flipper.checkpoints.stubs import Object
from flipper.errors import CheckpointError, UsageError
from flipper.training.recipes.recipe import Data

FOLDER: Final = "cifar-10-batches-py"
TRAIN: Final = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST: Final = "test_batch"
PIXELS: Final = 3 * 32 * 32


@functools.cache
def cifar10(folder: Path | None) -> Data:
    """The five batches to train on and the one to test with; features (n, 3, 32, 32) uint8, as they are in the files.

    folder: cifar-10-batches-py, or the folder that it is in. Raises UsageError: it, or a file of it, is not there or
    no such batch.
    """
    if folder is None:
        raise UsageError(f"CIFAR-10 comes with no package: give --data-dir DIR, {_wanted()}")
    place = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    missing = [name for name in (*TRAIN, TEST) if not (place / name).is_file()]
    if missing:
        raise UsageError(f"no CIFAR-10 in --data-dir {folder}: {', '.join(missing)} missing; give {_wanted()}")
    batches = [read_batch(place / name) for name in TRAIN]
    images, labels = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*batches, strict=True))
    return Data(images, labels, *map(torch.from_numpy, read_batch(place / TEST)))


def read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images (n, 3, 32, 32) uint8 and labels (n,) int64 of one file; UsageError when it is no such file."""
    try:
        content = Machine(path.read_bytes(), str(path)).run()
        images = _array(_entry(content, "data"))
        labels = _entry(content, "labels")
        if not isinstance(labels, list) or len(labels) != len(images):
            raise ValueError("labels is no list with a number for each image")
        if not all(type(label) is int and 0 <= label < 10 for label in labels):
            raise ValueError("a label is none of 0 to 9")
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
    except Ended:
        raise UsageError(f"{path} is no batch of CIFAR-10's python version: the file ends too early") from None
    except (CheckpointError, ValueError) as error:
        reason = error.message if isinstance(error, CheckpointError) else error
        raise UsageError(f"{path} is no batch of CIFAR-10's python version: {reason}") from error
    return images.reshape(-1, 3, 32, 32).copy(), np.array(labels, dtype=np.int64)


def _wanted() -> str:
    return f"the folder {FOLDER} of CIFAR-10's python version ({TRAIN[0]} to {TRAIN[-1]}, {TEST}) or the one it is in"


def _entry(content: Any, name: str) -> Any:
    """A value by its key, which Python 2 wrote as a string and Python 3 as bytes."""
    if not isinstance(content, dict):
        raise ValueError("it holds no dict")
    for key in (name, name.encode()):
        if key in content:
            return content[key]
    raise ValueError(f"it has no {name!r}")


def _array(stub: Any) -> NDArray[np.uint8]:
    """The array (n, PIXELS) uint8 that a pickle describes: by _reconstruct, or _frombuffer in a protocol of 5."""
    match stub:
        case Object(name="numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct",
                    state=(_, shape, dtype, fortran, raw)):  # fmt: skip
            pass
        case Object(name="numpy.core.numeric._frombuffer" | "numpy._core.numeric._frombuffer",
                    args=(raw, dtype, shape, order)):  # fmt: skip
            fortran = order == "F"
        case _:
            raise ValueError("data is no numpy array")
    if not isinstance(dtype, Object) or dtype.name != "numpy.dtype" or dtype.args[:1] not in (("u1",), ("|u1",)):
        raise ValueError("data is not uint8")
    octets = raw.encode("latin-1") if isinstance(raw, str) else raw  # Python 2's str
    rows = len(octets) // PIXELS if isinstance(octets, (bytes, bytearray)) else 0
    if rows == 0 or shape != (rows, PIXELS) or len(octets) != rows * PIXELS:
        raise ValueError(f"data is not of shape [n, {PIXELS}]")
    flat = np.frombuffer(octets, np.uint8)
    return flat.reshape(PIXELS, rows).T if fortran else flat.reshape(rows, PIXELS)
