"""Subjects: whose state is saved: a recipe in training, a checkpoint's tensors, or tensors that are made up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from flipper.checkpoints import open_checkpoint
from flipper.errors import UsageError
from flipper.study.spec import CONTENTS, StudySpec
from flipper.training import loop, saving, seeds
from flipper.training.parallel.grid import Grid
from flipper.training.parallel.shards import EVERYWHERE, Shard, whole
from flipper.training.progress import Progress
from flipper.training.ranks import Place
from flipper.training.spec import TrainSpec
from flipper.training.ties import parameters_of

ENDLESS: Final = 1 << 40
"""Steps of a run that is stepped by hand."""

WIDTH: Final = 1024
"""Rows and columns of a tensor that is made up: 4 MiB of float32."""


class Subject(Protocol):
    """One rank's part of what is saved."""

    @property
    def grid(self) -> Grid:
        """All ranks."""

    @property
    def batches(self) -> int | None:
        """Steps of an epoch; None where nothing is trained."""

    def held(self, content: str) -> dict[str, Shard]:
        """What this rank has of a content, and needs back after loading; live tensors."""

    def step(self) -> float | None:
        """Train for a step; seconds that it took. None where nothing is trained."""


def spoken_for(subject: Subject, content: str) -> dict[str, Shard]:
    """What this rank saves of a content; all ranks' together are the whole."""
    return {name: shard for name, shard in subject.held(content).items() if shard.speaks_for(subject.grid)}


def subject_of(spec: StudySpec, ranks: int, place: Place) -> Subject:
    """This rank's part; a collective. Raises UsageError for a content that nothing is of."""
    if spec.recipe is not None:
        return InTraining.begun(spec, ranks, place)
    parallel = spec.parallel(ranks)
    grid = Grid.of(parallel, place, torch.device("cpu"))
    replicated = parallel.replicated or ranks == 1
    made = _made_up(spec.synthetic) if spec.synthetic is not None else _read(spec.source)
    shards: dict[str, tuple[int, Shard]] = {}
    for level, name, tensor in made:
        shards[name] = level, _own_rows(tensor, grid, replicated)
    found = AtRest(grid, shards)
    for content in spec.contents:
        if not found.held(content):
            raise UsageError(f"--content {content}: {spec.source} has no tensors of that kind")
    return found


@dataclass
class AtRest:
    """Tensors that nobody trains. shards: by name, with the first of CONTENTS that they belong to, as a number."""

    grid: Grid
    shards: dict[str, tuple[int, Shard]]
    batches: None = None

    def held(self, content: str) -> dict[str, Shard]:
        most = CONTENTS.index(content)
        return {name: shard for name, (level, shard) in self.shards.items() if level <= most}

    def step(self) -> None:
        return None


def _own_rows(tensor: Tensor, grid: Grid, replicated: bool) -> Shard:
    """A rank's rows, as torch.chunk cuts them and FSDP too; all, where ranks are replicas or there are no rows."""
    if replicated or not tensor.dim():
        return Shard(tensor.clone(), tuple(tensor.shape), (0,) * tensor.dim(), EVERYWHERE)
    rows = -(-len(tensor) // grid.world)
    start = min(grid.rank * rows, len(tensor))
    own = tensor[start : start + rows].clone()
    return Shard(own, tuple(tensor.shape), (start,) + (0,) * (tensor.dim() - 1), frozenset())


def _read(path: Path | None) -> Iterator[tuple[int, str, Tensor]]:
    """The tensors of a checkpoint with their level of CONTENTS."""
    assert path is not None
    levels = {"parameter": 0, "buffer": 1, "optimizer": 2}
    with open_checkpoint(path) as checkpoint:
        for stored, _, tensor in saving.tensors_of(checkpoint):
            yield levels.get(stored.role, 3), stored.name, tensor


def _made_up(size: int) -> Iterator[tuple[int, str, Tensor]]:
    """Parameters of so many bytes with Adam's state, progress and a generator's."""
    generator = torch.Generator().manual_seed(0)
    left, number = size // 4, 0
    while left:
        rows = min(WIDTH, left // WIDTH)
        shape = (rows, WIDTH) if rows else (left,)
        values = torch.randn(shape, generator=generator)
        name = f"layers.{number}.weight"
        yield 0, f"model.{name}", values
        yield 2, f"optimizer.{name}.exp_avg", values * 1e-3
        yield 2, f"optimizer.{name}.exp_avg_sq", values.square() * 1e-6
        left -= values.numel()
        number += 1
    for name, tensor in (Progress(0, 0, 0, 0).to_state() | {"rng.rank0.cpu": torch.get_rng_state()}).items():
        yield 3, name, tensor


@dataclass
class InTraining:
    """A recipe's run."""

    run: loop.Run

    @classmethod
    def begun(cls, spec: StudySpec, ranks: int, place: Place, state: dict[str, Tensor] | None = None) -> InTraining:
        """At its first step. state: a canonical one to go on from."""
        assert spec.recipe is not None
        train = TrainSpec(spec.recipe, spec.parallel(ranks), steps=ENDLESS, seed=spec.seed, device=spec.device,
                          timeout=spec.timeout, data_dir=spec.data_dir)  # fmt: skip
        return cls(loop.begin(train, place, lambda event: None, state=state))

    @property
    def grid(self) -> Grid:
        return self.run.layout.grid

    @property
    def batches(self) -> int:
        return self.run.batches

    def step(self) -> float:
        began = time.perf_counter()
        self.run.train_step()
        return time.perf_counter() - began

    def held(self, content: str) -> dict[str, Shard]:
        shards = self.run.layout.live()
        parameters = {f"model.{name}" for name in parameters_of(self.run.layout.module)}
        if content == "all":
            schedule = self.run.layout.schedule
            common = self.run.progress.to_state() | ({} if schedule is None else schedule.to_state())
            own = seeds.capture(self.grid.rank, str(self.grid.parallel), self.grid.device)
            common["rng.layout"] = own.pop("rng.layout")
            shards |= {name: whole(tensor) for name, tensor in common.items()}
            shards |= {name: whole(tensor, frozenset()) for name, tensor in own.items()}
        wanted = {"parameters": tuple(parameters), "model": ("model.",), "optimizer": ("model.", "optimizer.")}
        prefixes = wanted.get(content, ("",))
        exact = content == "parameters"
        return {
            name: shard
            for name, shard in shards.items()
            if (name in parameters if exact else name.startswith(prefixes))
        }


def emptied(shards: dict[str, Shard]) -> dict[str, Shard]:
    """The same shards in new memory of the CPU, to be loaded to."""
    return {
        name: replace(shard, tensor=torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype))
        for name, shard in shards.items()
    }
