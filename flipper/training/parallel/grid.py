"""Grid: the ranks as rows that share a model and columns that share a batch, with a process group for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flipper.training.layouts import Parallel
from flipper.training.ranks import Place

T = TypeVar("T")


@dataclass(frozen=True)
class Grid:
    """This rank's place in data_size x model_size ranks; rank = replica * model_size + part.

    mesh: the same as torch sees it, with the axes "data" and "model".
    """

    parallel: Parallel
    rank: int
    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def of(cls, parallel: Parallel, place: Place, device: torch.device) -> Grid:
        """The grid of a layout; a collective, since it makes process groups."""
        shape = (parallel.data_size, parallel.model_size)
        return cls(parallel, place.rank, device, init_device_mesh(device.type, shape, mesh_dim_names=("data", "model")))

    @property
    def world(self) -> int:
        return self.parallel.ranks

    @property
    def replica(self) -> int:
        """Which share of the batch is this rank's."""
        return self.rank // self.parallel.model_size

    @property
    def part(self) -> int:
        """Which part of the model is this rank's."""
        return self.rank % self.parallel.model_size

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks that hold the same part for other shares of the batch, by replica."""
        return self.mesh.get_group("data")

    @property
    def parts(self) -> dist.ProcessGroup:
        """The ranks that hold the parts of one replica, in order."""
        return self.mesh.get_group("model")

    def everyone(self, mine: T) -> list[T]:
        """What every rank says, by rank; a collective, for small things."""
        said = [mine] * self.world
        if self.world > 1:
            dist.all_gather_object(said, mine)
        return said

    def stacked(self, mine: torch.Tensor) -> torch.Tensor:
        """Each rank's vector, by rank; a collective."""
        everyone = mine.new_empty((self.world, len(mine)))
        # Gloo's all_gather goes round the ranks one by one.
        dist.all_to_all_single(everyone, mine.repeat(self.world).view_as(everyone))
        return everyone

    @property
    def stream(self) -> int:
        """The number of this rank's random stream.

        Ranks of one tensor-parallel group compute on the same activations and must drop the same ones.
        """
        return self.replica if self.parallel.model == "tensor" else self.rank
