"""PyTorch's zip, safetensors and numpy's npz, each by its own library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from flipper.study.formats.format import OneFile, as_array, as_tensor, nothing_to_close
from flipper.training.canonical import State

DTYPES: Final = "__dtypes__"
"""Entry of an npz: JSON, the dtypes of tensors that numpy has no numbers for."""


def _load_pytorch(path: Path) -> AbstractContextManager[Any]:
    state = torch.load(path, weights_only=True)
    return nothing_to_close(lambda name, box: state[name][box])


def _write_safetensors(state: State, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        yield lambda name, box: file.get_slice(name)[box] if box else file.get_tensor(name)


def _write_npz(save: Callable[..., None]) -> Callable[[State, Path], None]:
    def write(state: State, path: Path) -> None:
        arrays = {name: as_array(tensor) for name, tensor in state.items()}
        odd = {name: dtype for name, (_, dtype) in arrays.items() if dtype is not None}
        with path.open("wb") as file:
            save(file, **{name: array for name, (array, _) in arrays.items()}, **{DTYPES: json.dumps(odd)})

    return write


@contextmanager
def _open_npz(path: Path) -> Iterator[Any]:
    with np.load(path, allow_pickle=False) as file:
        odd = json.loads(str(file[DTYPES]))
        yield lambda name, box: as_tensor(file[name], odd.get(name))[box]


PYTORCH: Final = OneFile(torch.save, _load_pytorch)
SAFETENSORS: Final = OneFile(_write_safetensors, _open_safetensors)
NPZ: Final = OneFile(_write_npz(np.savez), _open_npz)
NPZ_DEFLATE: Final = OneFile(_write_npz(np.savez_compressed), _open_npz)
