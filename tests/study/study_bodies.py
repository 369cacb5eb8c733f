"""What ranks run in tests of the study, importable by name: tensors of every kind, cut over ranks, saved and loaded."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from torch import Tensor

from flipper.study import formats
from flipper.study.measuring import Trial, measure_rank
from flipper.study.restarting import KEPT_AT, _Restarts
from flipper.study.spec import Combination, StudySpec
from flipper.study.subjects import AtRest, _own_rows, emptied, spoken_for
from flipper.training.layouts import Parallel
from flipper.training.parallel.grid import Grid
from flipper.training.ranks import Emit, Place


def tensors() -> dict[str, Tensor]:
    """Of several dtypes; of no axis, of no element, of fewer rows than ranks, and of rows that don't part evenly."""
    generator = torch.Generator().manual_seed(5)
    return {
        "model.a.weight": torch.randn(7, 3, generator=generator),
        "model.a.bias": torch.randn(5, generator=generator).bfloat16(),
        "model.one": torch.tensor([3.5], dtype=torch.float64),
        "model.none": torch.zeros(0, 4),
        "model.cube": torch.randn(4, 2, 3, generator=generator),
        "optimizer.a.weight.step": torch.tensor(12.0),
        "progress.step": torch.tensor(2**40 + 1),
        "rng.bytes": torch.arange(11, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "half": torch.tensor([float("nan"), -0.0, 1.0]).half(),
    }


def round_trip(names: tuple[str, ...], folder: Path, place: Place, emit: Emit) -> None:
    """Save in every format, and in the background where that can be; emit what each rank gets back."""
    parallel = Parallel.parse(f"fsdp:{place.world}") if place.world > 1 else Parallel()
    grid = Grid.of(parallel, place, torch.device("cpu"))
    subject = AtRest(grid, {name: (0, _own_rows(tensor, grid, place.world == 1)) for name, tensor in tensors().items()})
    for name in names:
        format = formats.get(name)
        format.prepare(grid)
        for mode in ("sync", "async") if formats.FORMATS[name].asynchronous else ("sync",):
            path = folder / f"{name}-{mode}"
            if mode == "sync":
                format.save(spoken_for(subject, "all"), grid, path, False)
            else:
                format.save_async(spoken_for(subject, "all"), grid, path, False).result()  # type: ignore[attr-defined]
            torch.distributed.barrier()
            into = emptied(subject.held("all"))
            format.load(into, grid, path)
            held = subject.held("all")
            wrong = [each for each in held if not _same(into[each].tensor, held[each].tensor)]
            emit({"event": "loaded", "format": name, "mode": mode, "rank": place.rank, "wrong": wrong})


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes() \
        if a.dtype != torch.bfloat16 else torch.equal(a.view(torch.int16), b.view(torch.int16))  # fmt: skip


def with_small_files(spec: StudySpec, most: int, folder: Path, place: Place, emit: Emit) -> None:
    """Measure where the system takes no file of more bytes than this."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    measure_rank(spec, place.world, folder, place, emit)


def peak_of_a_save(folder: Path, place: Place, emit: Emit) -> None:
    """A safetensors save of 30 MB, of which the writer makes no copy, and an npz that is compressed."""
    grid = Grid.of(Parallel(), place, torch.device("cpu"))
    big = torch.randn(7_500_000)
    subject = AtRest(grid, {"model.big": (0, _own_rows(big, grid, True))})
    for mode in ("sync", "async"):
        format = formats.get("dcp")
        format.prepare(grid)
        trial = Trial(subject, format, Combination("dcp", "all", 1, mode, False), folder / mode, None)
        emit({"event": "measured", "mode": mode, "values": trial.measure()})


def altered(spec: StudySpec, folder: Path, place: Place, emit: Emit) -> None:
    """What is said of a checkpoint that lost a bit of a weight, and of one that lacks nothing."""
    restarts = _Restarts.prepared(spec, 1, folder, place)
    assert int(restarts.full["progress.step"]) == KEPT_AT
    whole = {name: tensor.clone() for name, tensor in restarts.full.items()}
    emit({"event": "missing", "missing": restarts.missing(whole, "all")})
    whole["model.fc1.weight"][3, 5] += 2.0**-6
    emit({"event": "missing", "missing": restarts.missing(whole, "all")})
