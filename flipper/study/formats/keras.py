"""Keras: the tensors as the weights of a Keras model, saved and loaded by Keras itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch

from flipper.errors import UsageError
from flipper.study.formats.format import Shards, gathered, synced
from flipper.training.canonical import dtype_name
from flipper.training.parallel.grid import Grid

SUFFIX: Final = ".weights.h5"
"""Keras insists on it."""

Listed = tuple[tuple[str, tuple[int, ...], str], ...]
"""Names, shapes and dtypes, in the order of names."""


class KerasWeights:
    """A model of one layer for each set of names; its variables are copied to before saving and from after loading."""

    def __init__(self) -> None:
        self._models: dict[Listed, tuple[Any, list[Any]]] = {}

    def prepare(self, grid: Grid) -> None:
        os.environ.setdefault("KERAS_BACKEND", "torch")
        import keras

        if keras.backend.backend() != "torch":
            raise UsageError(f"--formats keras: the ranks have torch's tensors; unset KERAS_BACKEND, now "
                             f"{keras.backend.backend()}, or set it to torch")  # fmt: skip

    def save(self, shards: Shards, grid: Grid, path: Path, fsync: bool) -> None:
        listed = _listed(shards, grid)
        state = gathered(shards, grid)
        if grid.rank == 0:
            model, variables = self._model(listed)
            for (name, _, _), variable in zip(listed, variables, strict=True):
                variable.assign(state[name])
            file = path.with_name(path.name + SUFFIX)
            model.save_weights(file)
            file.rename(path)
            if fsync:
                synced(path)

    def load(self, shards: Shards, grid: Grid, path: Path) -> None:
        listed = _listed(shards, grid)
        model, variables = self._model(listed)
        file = path.with_name(f"{path.name}-{grid.rank}{SUFFIX}")
        file.symlink_to(path)
        try:
            model.load_weights(file)
        finally:
            file.unlink()
        for (name, _, _), variable in zip(listed, variables, strict=True):
            if name in shards:
                shards[name].tensor.copy_(variable.value.detach()[shards[name].box])

    def _model(self, listed: Listed) -> tuple[Any, list[Any]]:
        if listed not in self._models:
            self._models[listed] = _built(listed)
        return self._models[listed]


def _listed(shards: Shards, grid: Grid) -> Listed:
    """Of all ranks."""
    mine = [(name, shard.shape, dtype_name(shard.tensor)) for name, shard in shards.items()]
    return tuple(sorted({each for rank in grid.everyone(mine) for each in rank}))


def _built(listed: Listed) -> tuple[Any, list[Any]]:
    import keras

    class Tensors(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tensors = [
                self.add_weight(shape=shape, dtype=dtype, initializer="zeros", trainable=False, name=f"tensor{number}")
                for number, (_, shape, dtype) in enumerate(listed)
            ]
            self.built = True

        def call(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs

    layer = Tensors()
    with torch.device("cpu"):
        return keras.Sequential([keras.Input((1,)), layer]), layer.tensors


WEIGHTS: Final = KerasWeights()
