"""Work that the benchmark runs in processes of their own: `work.py NAME ARGUMENTS` prints the result as JSON.

make: files of a given size. library: flipper called from Python, its imports done. rewrite: what people do without it.
"""

import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

COUNT, WIDTH = 64, 4096
"""Tensors in a file, and columns of each."""


def make(kind: str, path: str, megabytes: str) -> None:
    """Write a checkpoint of 64 float32 tensors, whatever its size, in a container format."""
    rows = (int(megabytes) << 20) // (COUNT * WIDTH * 4)
    block = np.random.default_rng(0).standard_normal((rows, WIDTH), np.float32) * np.float32(0.02)
    names = [f"layers.{number}.weight" for number in range(COUNT)]
    MAKERS[kind](Path(path), names, block)


def _safetensors(path: Path, names: list[str], block: np.ndarray) -> None:
    header: dict[str, Any] = {}
    for number, name in enumerate(names):
        span = [number * block.nbytes, (number + 1) * block.nbytes]
        header[name] = {"dtype": "F32", "shape": list(block.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in names:
            file.write(block)


def _sharded(path: Path, names: list[str], block: np.ndarray) -> None:
    path.mkdir()
    shards = [names[: len(names) // 2], names[len(names) // 2 :]]
    where = {}
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _safetensors(path / file, part, block)
        where.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": len(names) * block.nbytes}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _pytorch(path: Path, names: list[str], block: np.ndarray, zipped: bool = True) -> None:
    import torch

    tree = {name: torch.from_numpy(block.copy()) for name in names}
    torch.save(tree, path, _use_new_zipfile_serialization=zipped)


def _dcp(path: Path, names: list[str], block: np.ndarray) -> None:
    import warnings

    import torch
    from torch.distributed import checkpoint

    warnings.simplefilter("ignore")
    checkpoint.save({name: torch.from_numpy(block) for name in names}, checkpoint_id=path)


def _hdf5(path: Path, names: list[str], block: np.ndarray) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name in names:
            file[name.replace(".", "/")] = block


def _hdf5_gzip(path: Path, names: list[str], block: np.ndarray) -> None:
    """Chunks of 64 KiB, compressed once and stored many times."""
    import zlib

    import h5py

    packed = zlib.compress(block[:4].tobytes(), 1)
    with h5py.File(path, "w") as file:
        for name in names:
            data = file.create_dataset(
                name.replace(".", "/"), block.shape, block.dtype, chunks=(4, block.shape[1]), compression="gzip"
            )
            for row in range(0, block.shape[0], 4):
                data.id.write_direct_chunk((row, 0), packed)


def _keras(path: Path, names: list[str], block: np.ndarray) -> None:
    weights = path.with_suffix(".weights")
    _hdf5(weights, names, block)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", "{}")
        archive.write(weights, "model.weights.h5")
    weights.unlink()


MAKERS: dict[str, Callable[[Path, list[str], np.ndarray], None]] = {
    "safetensors": _safetensors,
    "sharded": _sharded,
    "pytorch": _pytorch,
    "legacy": lambda path, names, block: _pytorch(path, names, block, zipped=False),
    "dcp": _dcp,
    "hdf5": _hdf5,
    "hdf5-gzip": _hdf5_gzip,
    "keras": _keras,
}


def make_tensors(path: str, count: str) -> None:
    """A PyTorch file of many small tensors."""
    import torch

    tree = {f"blocks.{i // 10}.part{i % 10}.weight": torch.full((8, 8), float(i)) for i in range(int(count))}
    torch.save(tree, path)


def make_datasets(path: str, count: str, megabytes: str) -> None:
    """An HDF5 file of so many datasets, in all of so many MB."""
    import h5py

    block = np.random.default_rng(0).standard_normal((int(megabytes) * 1_000_000 // 4 // int(count),), np.float32)
    with h5py.File(path, "w") as file:
        for number in range(int(count)):
            file[f"layer{number}/weight"] = block


def inject_copy(source: str, target: str, rounds: str) -> float:
    """Seconds that a library call takes for one flip into a copy: the least of some rounds."""
    with _injector() as once:
        return min(_timed_copy(once, Path(source), Path(target)) for _ in range(int(rounds)))


def _timed_copy(once: Callable[..., None], source: Path, target: Path) -> float:
    os.sync()
    start = perf_counter()
    once(source, target)
    seconds = perf_counter() - start
    target.unlink()
    target.with_name(target.name + ".flipper.json").unlink()
    return seconds


def inject_in_place(rounds: str, *paths: str) -> list[list[float]]:
    """Seconds for one flip in place, from opening to flushed, of each file in turn: the least of some rounds.

    For each file: in all, and without the time in which the disk flushes.
    """
    flushes: list[float] = []
    flush = os.fsync

    def timed(descriptor: int) -> None:
        start = perf_counter()
        flush(descriptor)
        flushes.append(perf_counter() - start)

    os.fsync = timed
    least = [[float("inf")] * 2 for _ in paths]
    with _injector() as once:
        for _ in range(int(rounds)):
            for path, best in zip(paths, least, strict=True):
                flushes.clear()
                start = perf_counter()
                once(Path(path), None)
                seconds = perf_counter() - start
                best[:] = min(best[0], seconds), min(best[1], seconds - sum(flushes))
                Path(path + ".flipper.json").unlink()
    return least


@contextmanager
def _injector() -> Iterator[Callable[..., None]]:
    from flipper.checkpoints import open_checkpoint
    from flipper.faults.draw import draw
    from flipper.faults.model import FaultModel
    from flipper.injection.inject import inject

    def once(source: Path, target: Path | None) -> None:
        with open_checkpoint(source) as checkpoint:
            inject(checkpoint, target, draw(checkpoint, FaultModel(count=1), seed=7))

    yield once


def rewrite(kind: str, source: str, target: str) -> None:
    """Load a checkpoint, flip one bit, save it: with the format's own library."""
    REWRITERS[kind](source, target)


def _rewrite_pytorch(source: str, target: str) -> None:
    import torch

    tree = torch.load(source)
    torch.ravel(next(iter(tree.values()))).view(torch.int32)[17] ^= 1 << 30
    torch.save(tree, target)


def _rewrite_safetensors(source: str, target: str) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(source)
    next(iter(tensors.values())).reshape(-1).view(np.int32)[17] ^= 1 << 30
    save_file(tensors, target)


def _rewrite_hdf5(source: str, target: str) -> None:
    import h5py

    with h5py.File(source) as old, h5py.File(target, "w") as new:
        tensors: dict[str, np.ndarray] = {}
        old.visititems(lambda name, item: tensors.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
        next(iter(tensors.values())).reshape(-1).view(np.int32)[17] ^= 1 << 30
        for name, array in tensors.items():
            new[name] = array


REWRITERS = {"pytorch": _rewrite_pytorch, "safetensors": _rewrite_safetensors, "hdf5": _rewrite_hdf5}


def live(site: str, path: str, rounds: str) -> list[float]:
    """CPU seconds for one random flip in a live network: flipper's strike, drawing included, and PyTorchFI's."""
    import torch
    from safetensors.torch import save_file

    sys.path.append(site)
    from pytorchfi.core import fault_injection

    from flipper.checkpoints import open_checkpoint
    from flipper.faults.draw import draw
    from flipper.faults.model import FaultModel
    from flipper.injection.memory import strike

    torch.set_num_threads(1)
    network = torch.nn.Sequential(*(torch.nn.Conv2d(512, 512, 3) for _ in range(5)))
    save_file(network.state_dict(), path)
    peer = fault_injection(network, 1, input_shape=[512, 16, 16], layer_types=[torch.nn.Conv2d], use_cuda=False)

    def theirs(number: int) -> None:
        peer.declare_weight_fi(k=0, dim1=number, dim2=0, dim3=1, dim4=1, function=_flipped)

    with open_checkpoint(path) as checkpoint:
        own = _cpu(lambda number: strike(network.state_dict(), draw(checkpoint, FaultModel(), number)), int(rounds))
    return [own, _cpu(theirs, int(rounds))]


def steps(recipe: str, layout: str, allreduce: str, count: str) -> float:
    """Seconds from one step's record to the next's, in the middle of a run of flipper."""
    from flipper.training.layouts import Parallel
    from flipper.training.run import train
    from flipper.training.spec import TrainSpec

    spec = TrainSpec(recipe, Parallel.parse(layout), steps=int(count), seed=1, allreduce=allreduce)
    return _step_seconds(lambda hear: train(spec, hear))


def own_steps(recipe: str, layout: str, recovery: str, count: str) -> float:
    """As `steps`, by the bucketed reducer of runs whose ranks may die."""
    from flipper.failstop.run import train_through
    from flipper.failstop.spec import FailstopSpec
    from flipper.training.layouts import Parallel
    from flipper.training.spec import TrainSpec

    spec = TrainSpec(recipe, Parallel.parse(layout), steps=int(count), seed=1)
    return _step_seconds(lambda hear: train_through(FailstopSpec(spec, (), recovery), hear))


def _step_seconds(run: Callable[[Callable[[dict[str, Any]], None]], object]) -> float:
    """The median time between steps of a run, the first quarter left out. run: is given what hears of events."""
    from statistics import median

    times: list[float] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            times.append(perf_counter())

    run(hear)
    gaps = [later - sooner for sooner, later in pairwise(times)]
    return median(gaps[len(gaps) // 4 :])


def chosen_interval(layout: str, mtbf: str) -> int:
    """The steps between checkpoints that a run of digits-cnn chooses for so many seconds between failures."""
    import tempfile

    from flipper.failstop.run import train_through
    from flipper.failstop.spec import FailstopSpec
    from flipper.training.layouts import Parallel
    from flipper.training.spec import Event, TrainSpec

    chosen: list[int] = []

    def hear(event: Event) -> None:
        if event["event"] == "interval":
            chosen.append(event["save_every"])

    with tempfile.TemporaryDirectory(prefix="flipper-bench-") as folder:
        spec = TrainSpec("digits-cnn", Parallel.parse(layout), steps=12, seed=1, save=Path(folder), mtbf=float(mtbf))
        train_through(FailstopSpec(spec, (), "restart"), hear)
    return chosen[0]


def death(layout: str, recovery: str, saved: str, lost: str) -> float:
    """Seconds from the death of a rank to the end of the step under way, or of one as far again.

    saved: the step after which a checkpoint is written; lost: how many steps later the rank dies, no more than that.
    """
    import tempfile

    from flipper.failstop.kills import Kill
    from flipper.failstop.run import train_through
    from flipper.failstop.spec import FailstopSpec
    from flipper.training.layouts import Parallel
    from flipper.training.spec import Event, TrainSpec

    begin, step = int(saved), int(saved) + int(lost)
    died, seconds = 0.0, 0.0

    def hear(event: Event) -> None:
        nonlocal died, seconds
        if event["event"] == "rank-lost":
            died = perf_counter() - event["seconds_to_detect"]
        elif event["event"] == "step" and died and event["step"] == step:
            seconds = perf_counter() - died

    with tempfile.TemporaryDirectory(prefix="flipper-bench-") as folder:
        spec = TrainSpec(
            "digits-cnn", Parallel.parse(layout), steps=step + 2, seed=1, save=Path(folder) / "saved", save_every=begin
        )
        train_through(FailstopSpec(spec, (Kill(1, step=step, bucket=1),), recovery), hear)
    return seconds


def shrinks(count: str) -> float:
    """Seconds that MPI takes to shrink a communicator of three, one of which has died; a median."""
    from statistics import median

    from flipper.failstop.kills import Kill
    from flipper.failstop.run import train_through
    from flipper.failstop.spec import FailstopSpec
    from flipper.training.layouts import Parallel
    from flipper.training.spec import Event, TrainSpec

    seconds: list[float] = []

    def hear(event: Event) -> None:
        if event["event"] == "recovered":
            seconds.append(event["seconds_to_shrink"])

    for _ in range(int(count)):
        spec = TrainSpec("digits-mlp", Parallel("mpi", 3), steps=4, seed=1)
        train_through(FailstopSpec(spec, (Kill(1, step=2, bucket=1),), "lossy"), hear)
    return median(seconds)


def snapshots(recipe: str, count: str) -> float:
    """Seconds that a snapshot of parameters and optimizer takes; a median."""
    import functools

    from flipper.training.launch import run_ranks
    from flipper.training.spec import TrainSpec

    found: list[float] = []
    body = functools.partial(_snapshots, TrainSpec(recipe, steps=1000, seed=1), int(count))
    run_ranks(body, 1, lambda event: found.append(event["seconds"]))
    return found[0]


def _snapshots(spec: Any, count: int, place: Any, emit: Any) -> None:
    from statistics import median

    from flipper.failstop.snapshot import Snapshot
    from flipper.training import loop

    run = loop.begin(spec, place, emit=lambda event: None)
    run.train_step()
    snapshot = Snapshot(run.layout.module, run.layout.optimizer, whole=True)
    times = []
    for _ in range(count):
        start = perf_counter()
        snapshot.take()
        times.append(perf_counter() - start)
    emit({"seconds": median(times)})


def simulated(workers: str, count: str) -> tuple[float, float]:
    """Seconds a simulated step of digits-mlp takes, one sample a worker, all at once; and the peak memory in MB."""
    import functools

    from flipper.training.launch import run_ranks
    from flipper.training.spec import TrainSpec

    found: list[tuple[float, float]] = []
    body = functools.partial(_simulated, TrainSpec("digits-mlp", steps=10**6, seed=1), int(workers), int(count))
    run_ranks(body, 1, lambda event: found.append((event["seconds"], event["megabytes"])))
    return found[0]


def _simulated(spec: Any, workers: int, count: int, place: Any, emit: Any) -> None:
    import resource

    from flipper.failstop.workers import Rules, Workers
    from flipper.training import loop

    run = loop.begin(spec, place, lambda event: None, batch_size=workers)
    simulated = Workers(run, workers, Rules("rollback"), exact=False)
    for _ in range(10):
        simulated.step()
    start = perf_counter()
    for _ in range(count):
        simulated.step()
    seconds = (perf_counter() - start) / count
    emit({"seconds": seconds, "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024})


def pool(jobs: str, steps: str) -> float:
    """Seconds a trial of two ranks, many being run by a pool that is warm."""
    from flipper.training.layouts import Parallel
    from flipper.training.pool import Pool
    from flipper.training.run import train
    from flipper.training.spec import TrainSpec

    spec = TrainSpec("digits-cnn", Parallel.parse("ddp:2"), steps=int(steps), seed=1)
    with Pool(2) as running:
        running.submit_ranks(2, train, spec).result()
        start = perf_counter()
        waiting = [running.submit_ranks(2, train, spec) for _ in range(int(jobs))]
        assert len({future.result().state_digest for future in waiting}) == 1
        return (perf_counter() - start) / int(jobs)


def _wide(megabytes: str) -> Any:
    """A model and its Adam, of so many MB in all: parameters and two moments."""
    import torch

    rows = (int(megabytes) << 20) // (3 * 4 * COUNT * WIDTH)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, rows, bias=False) for _ in range(COUNT)))
    return model, torch.optim.Adam(model.parameters())


def make_state(ours: str, theirs: str, megabytes: str) -> None:
    """The same state as flipper's canonical one, and as state_dicts by torch.save."""
    import torch

    from flipper.training import saving

    model, optimizer = _wide(megabytes)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0), "exp_avg": torch.randn_like(parameter), "exp_avg_sq": torch.rand_like(parameter)
        }  # fmt: skip
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    saving.save(state, Path(ours), "pytorch")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, theirs)


def resume(path: str, megabytes: str) -> tuple[float, float]:
    """Seconds to take a canonical state up, and MB of memory of its own that it added."""
    import torch.distributed as dist

    from flipper.training import canonical, saving
    from flipper.training.layouts import Parallel
    from flipper.training.parallel import Layout, grid
    from flipper.training.parallel.whole import Whole
    from flipper.training.ranks import Place
    from flipper.training.recipes.recipe import Recipe

    model, optimizer = _wide(megabytes)
    unused: Any = print
    recipe = Recipe("wide", lambda: model, unused, unused, unused, lambda _: optimizer, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    place = grid.Grid.of(Parallel(), Place(0, 1, "cpu", "", 60.0, 0, 1), next(model.parameters()).device)
    layout = Layout(place, recipe, Whole(recipe, model, lambda module: module), {})
    before, start = _own_memory(), perf_counter()
    state = saving.load(Path(path))
    canonical.check(state, model, "wide")
    layout.load(state)
    return perf_counter() - start, _own_memory() - before


def load_state(path: str, megabytes: str) -> tuple[float, float]:
    """The same with torch alone, with the optimizer's tensors copied, whose pages would be read at the first step."""
    import torch

    model, optimizer = _wide(megabytes)
    before, start = _own_memory(), perf_counter()
    state = torch.load(path, mmap=True, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for held in optimizer.state.values():
        held.update({key: tensor.clone() for key, tensor in held.items()})
    return perf_counter() - start, _own_memory() - before


def _own_memory() -> float:
    """The peak of this process's memory in MB; mapped files are the system's and don't count."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) / 1024


def _flipped(weight: Any, place: Any) -> Any:
    import torch

    return (weight[place].reshape(1).view(torch.int32) ^ (1 << 30)).view(torch.float32)[0]


def _cpu(work: Callable[[int], Any], rounds: int) -> float:
    least = float("inf")
    for number in range(rounds):
        start = process_time()
        work(number)
        least = min(least, process_time() - start)
    return least


def bare_trials(folder: str) -> float:
    """Seconds to train the altered checkpoints that a campaign kept, one after the other, by `train` alone."""
    from flipper.campaigns.folder import open_campaign
    from flipper.training.layouts import Parallel
    from flipper.training.run import train
    from flipper.training.spec import TrainSpec

    spec = open_campaign(Path(folder)).spec
    layout = Parallel.parse("ddp:2")
    kept = sorted(Path(folder, "trials").glob("*/clean.safetensors"))
    server_start()
    start = perf_counter()
    for path in kept:
        train(TrainSpec(spec.recipe, layout, resume=path, epochs=spec.epochs))
    return perf_counter() - start


def server_start() -> float:
    """Seconds until the server that ranks are forked from has imported torch, and Python has started."""
    from flipper.training.fingerprint import machine_fingerprint

    start = perf_counter()
    machine_fingerprint()
    return perf_counter() - start


def made_trials(folder: str, trials: str) -> int:
    """A campaign's folder with so many made-up trials: 20 cells, 62 steps and four evaluations each, ten faults."""
    import random

    from flipper.campaigns.cells import trial_seed
    from flipper.campaigns.folder import settle
    from flipper.campaigns.record import RunRecord
    from flipper.campaigns.spec import spec_of
    from flipper.campaigns.store import Store

    draw = random.Random(1)
    table = {"name": "stored", "recipe": "digits-cnn", "inject_epoch": 2, "epochs": 4, "trials": int(trials) // 20,
             "null_trials": 20, "training_seeds": [1, 2, 3]}  # fmt: skip
    axes = {"parallel": ["ddp:2", "pipeline:2"], "bits": ["sign", "exponent"], "count": [1, 10, 100, 1000, 10000]}
    spec = spec_of({"campaign": table, "axes": axes})
    campaign = settle(spec, Path(folder))

    def run(kind: str, parallel: str, trained: int, **values: Any) -> RunRecord:
        steps = [(step, draw.random(), draw.random()) for step in range(23, 85)]
        evals = [(step, 0.1, 0.95 + draw.gauss(0, 0.01)) for step in (44, 66, 75, 84)]
        return RunRecord(
            kind, parallel, trained, fingerprint="f", first_step=22, last_step=84, steps=steps, evals=evals, loss=0.1,
            metric=evals[-1][2], max_abs_parameter=1.0, resume_digest=str(draw.random()), seconds=1.0, **values,
        )  # fmt: skip

    with Store(campaign.folder.results(), write=True) as store:
        for parallel in axes["parallel"]:
            for seed in spec.training_seeds:
                store.add(run("golden", parallel, seed), run("control", parallel, seed))
            store.add(*(run("null", parallel, spec.training_seeds[n % 3], trial=n) for n in range(20)))
        for cell in campaign.cells:
            faults = [("model.conv1.weight", 7, [draw.randrange(32)], 0.5, 1.5) for _ in range(10)]
            store.add(*(
                run("trial", cell.parallel, spec.training_seeds[n % 3], cell=cell.number, trial=n,
                    seed=trial_seed(spec, cell, n), faults=faults, struck=cell.axes["count"], population=100_000)
                for n in range(cell.trials)
            ))  # fmt: skip
    return int(trials)


def planned(shape: str, algorithm: str, rounds: str, *holes: str) -> float:
    """Seconds to plan an allreduce round holes."""
    from flipper.mesh.chips import Mesh
    from flipper.mesh.plan import plan

    least = float("inf")
    for _ in range(int(rounds)):
        start = perf_counter()
        plan(Mesh.parse(shape, holes), algorithm)
        least = min(least, perf_counter() - start)
    return least


def proved(shape: str, algorithm: str, *holes: str) -> float:
    """Seconds to execute the schedule on symbols."""
    from flipper.mesh.chips import Mesh
    from flipper.mesh.plan import plan
    from flipper.mesh.proof import prove

    schedule = plan(Mesh.parse(shape, holes), algorithm)
    start = perf_counter()
    assert prove(schedule).holds
    return perf_counter() - start


def routed(algorithm: str, rounds: str) -> float:
    """Seconds of one allreduce of 100,003 float32 on 12 ranks by a schedule round a hole."""
    from flipper.mesh.chips import Mesh
    from flipper.mesh.plan import plan
    from flipper.training.mesh_execution import execute

    return execute(plan(Mesh.parse("4x4", ["2x2@0,2"]), algorithm), rounds=int(rounds)).seconds


def ordered(rounds: str) -> float:
    """The same by the sum in rank order."""
    import functools

    from flipper.training.launch import run_ranks

    heard: list[dict[str, Any]] = []
    run_ranks(functools.partial(_ordered_rank, int(rounds)), 12, heard.append)
    return float(heard[-1]["seconds"])


def _ordered_rank(rounds: int, place: Any, emit: Any) -> None:
    import torch
    import torch.distributed as dist

    from flipper.training.parallel.reduction import ordered_sum

    vector, least = torch.ones(100_003), float("inf")
    for _ in range(rounds):
        dist.barrier()
        start = perf_counter()
        ordered_sum(vector)
        dist.barrier()
        least = min(least, perf_counter() - start)
    if place.rank == 0:
        emit({"event": "done", "seconds": least})


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps(globals()[name](*arguments)))
