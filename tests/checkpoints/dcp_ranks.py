"""Saves DCP checkpoints from several ranks, as training on many machines does: run as `dcp_ranks.py FOLDER`.

Four ranks on gloo, forked once torch is imported. FOLDER gets a directory for each layout, and beside each what it
holds: full tensors by name, in one file of torch.save.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4


def trained(prepare: Callable[[nn.Module], object]) -> dict[str, object]:
    """Model and Adam's state after a step, under whatever `prepare` does to the module."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    prepare(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(8, 6)
    model(inputs).square().sum().backward()
    optimizer.step()
    states, moments = get_state_dict(model, optimizer)
    return {"model": states, "optim": moments, "step": 1, "rng": torch.get_rng_state()}


def fsdp2() -> dict[str, object]:
    """Rows over four ranks; the last layer has three rows, so one rank holds none of it."""
    return trained(lambda model: [*map(fully_shard, (model[0], model[2])), fully_shard(model)])


def tensor_parallel() -> dict[str, object]:
    """The first layer by rows, the second by columns."""
    mesh = init_device_mesh("cpu", (RANKS,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return trained(lambda model: parallelize_module(model, mesh, plan))


def fsdp2_and_tensor_parallel() -> dict[str, object]:
    """A mesh of two by two: rows cut twice, or rows and columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def prepare(model: nn.Module) -> None:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])

    return trained(prepare)


def placements() -> dict[str, object]:
    """DTensors of every placement, of dtypes that matter, some with fewer rows than ranks."""
    line, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    full = torch.randn(5, 7)

    def put(tensor: torch.Tensor, mesh: DeviceMesh, *where: object) -> DTensor:
        return distribute_tensor(tensor, mesh, where)

    return {
        "rows": put(full, line, Shard(0)), "columns": put(full, line, Shard(1)),
        "copies": put(full, line, Replicate()), "grid": put(full, square, Shard(0), Shard(1)),
        "crossed": put(full, square, Shard(1), Shard(0)), "twice": put(full, square, Shard(0), Shard(0)),
        "hybrid": put(full, square, Replicate(), Shard(1)),
        "few": put(torch.randn(2, 3), line, Shard(0)), "one": put(torch.randn(1), line, Shard(0)),
        "none": put(torch.randn(0, 3), line, Shard(0)),
        "cube": put(torch.randn(3, 4, 5), square, Shard(2), Shard(1)),
        "half": put(torch.randn(9).half(), line, Shard(0)),
        "brain": put(torch.randn(3, 3).bfloat16(), square, Shard(1), Shard(0)),
        "complex": put(torch.randn(5, 3, dtype=torch.complex64), line, Shard(0)),
        "whole": torch.arange(4.0), "scalar": torch.tensor(2.5), "list": [torch.ones(2), {"deep": torch.zeros(1)}],
        "number": 7, "pair": (1, "x"),
    }  # fmt: skip


LAYOUTS = (fsdp2, tensor_parallel, fsdp2_and_tensor_parallel, placements)


def full(value: object, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors under their dotted names, gathered; every rank has to call it."""
    if isinstance(value, DTensor):
        return {name: value.full_tensor()}
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {}
    for key, inner in items:
        found.update(full(inner, f"{name}.{key}" if name else str(key)))
    return found


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    for layout in LAYOUTS:
        state = layout()
        dcp.save(state, checkpoint_id=folder / layout.__name__)
        expected = {name: tensor.detach().clone() for name, tensor in full(state).items()}
        if rank == 0:
            torch.save(expected, folder / f"{layout.__name__}.pt")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run(rank, folder)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    if failed:
        sys.exit(f"{len(failed)} ranks failed")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
