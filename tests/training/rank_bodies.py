"""What the tests have ranks do; a module of its own, since ranks import it by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from flipper.errors import CheckpointError
from flipper.training.ranks import Emit, Place
from flipper.training.spec import Parallel, TrainSpec


def report(place: Place, emit: Emit) -> None:
    import torch

    emit({"event": "here", "rank": place.rank, "pid": os.getpid(), "threads": torch.get_num_threads()})


def tell_tunables(place: Place, emit: Emit) -> None:
    emit({"event": "tunables", "tunables": os.environ["GLIBC_TUNABLES"]})


def ordered_sums(place: Place, emit: Emit) -> None:
    """Sums of floats whose order matters, of a length that no number of ranks divides."""
    import torch

    from flipper.training.parallel.reduction import ordered_sum

    torch.manual_seed(place.rank)
    mine = torch.randn(1009) * 10.0 ** (torch.arange(1009) % 7)
    emit({"event": "sum", "rank": place.rank, "mine": mine.tolist(), "sum": ordered_sum(mine).tolist()})


def raise_on_rank_1(place: Place, emit: Emit) -> None:
    report(place, emit)
    if place.rank == 1:
        raise ZeroDivisionError("no\nsecond line")
    _wait_for_others()


def reject_on_all_ranks(place: Place, emit: Emit) -> None:
    raise CheckpointError("truncated", "seven bytes are missing")


def kill_rank_1(place: Place, emit: Emit) -> None:
    _signal_rank_1(place, emit, signal.SIGKILL)


def terminate_rank_1(place: Place, emit: Emit) -> None:
    _signal_rank_1(place, emit, signal.SIGTERM)


def stop_rank_1(place: Place, emit: Emit) -> None:
    _signal_rank_1(place, emit, signal.SIGSTOP)


def _signal_rank_1(place: Place, emit: Emit, number: signal.Signals) -> None:
    report(place, emit)
    if place.rank == 1:
        os.kill(os.getpid(), number)
    _wait_for_others()


def chatter(place: Place, emit: Emit) -> None:
    print("noise on stdout")
    os.write(1, b"noise on fd 1\n")
    os.write(2, b"noise on fd 2\n")
    sys.stdout.flush()


def sleep_long(place: Place, emit: Emit) -> None:
    report(place, emit)
    time.sleep(600)


def start_and_report(place: Place, emit: Emit) -> None:
    assert place.folder is not None
    _start(place.folder.parent)
    report(place, emit)


def start_and_fail(folder: Path, place: Place, emit: Emit) -> None:
    _start(folder)
    if place.rank == 0:
        raise ValueError("no more")
    time.sleep(600)


def _start(folder: Path) -> None:
    """Something that goes on for ten minutes; its number is the name of a file."""
    started = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (folder / str(started.pid)).touch()


def _wait_for_others() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))


def train_each(specs: tuple[TrainSpec, ...], place: Place, emit: Emit) -> None:
    """Several runs, one after the other; every event tells by `run` whose it is."""
    from flipper.training.loop import train_rank

    for number, spec in enumerate(specs):
        train_rank(spec, place, lambda event, run=number: emit({**event, "run": run}))


def load_each(recipe: str, parallel: Parallel, files: tuple[Path, ...], place: Place, emit: Emit) -> None:
    """Load one checkpoint after the other into one layout; tell the digest of what is gathered from it."""
    from flipper.training import canonical, recipes, saving
    from flipper.training.parallel import set_up

    found = recipes.get(recipe)
    layout = set_up(parallel, found, place, found.data(None).train_features[: found.batch_size])
    for file in files:
        layout.load(saving.load(file))
        state = layout.gather()
        if place.rank == 0:
            emit({"event": "loaded", "digest": canonical.digest(state)})


def compare_with_full_tensors(recipe: str, parallel: Parallel, place: Place, emit: Emit) -> None:
    """After one step, hold every shard against DTensor.full_tensor(), and what is gathered, too.

    Tells the box of each shard, and which tensors differ.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from flipper.training import recipes
    from flipper.training.parallel import set_up

    found = recipes.get(recipe)
    data = found.data(None)
    torch.manual_seed(1)
    layout = set_up(parallel, found, place, data.train_features[: found.batch_size])
    layout.load({f"model.{name}": tensor for name, tensor in found.model().state_dict().items()})
    layout.step(data.train_features, data.train_targets, torch.arange(found.batch_size))
    named = (*layout.module.named_parameters(), *layout.module.named_buffers())
    tensors = {f"model.{name}": tensor.detach() for name, tensor in named}
    for name, parameter in layout.module.named_parameters():
        for key, value in layout.optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    full = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}
    shards = layout.live()
    wrong = [
        name
        for name, whole in full.items()
        if shards[name].shape != tuple(whole.shape) or not torch.equal(shards[name].tensor, whole[shards[name].box])
    ]
    gathered = layout.gather()
    wrong += [name for name, each in gathered.items() if name in full and not torch.equal(each, full[name])]
    missing = sorted(full.keys() ^ gathered.keys()) if place.rank == 0 else []
    boxes = {name: [(each.start, each.stop) for each in shards[name].box] for name in full}
    split = [
        name for name, each in tensors.items() if isinstance(each, DTensor) and each.to_local().shape != each.shape
    ]
    emit({"event": "compared", "rank": place.rank, "wrong": wrong, "missing": missing, "boxes": boxes, "split": split,
          "shapes": {name: tuple(each.shape) for name, each in full.items()}})  # fmt: skip


def gather_what_was_loaded(recipe: str, parallel: Parallel, file: Path, place: Place, emit: Emit) -> None:
    """Save what a layout gathers after it has loaded a file, beside it, by safetensors itself."""
    from safetensors.torch import save_file

    from flipper.training import recipes, saving
    from flipper.training.parallel import set_up

    found = recipes.get(recipe)
    layout = set_up(parallel, found, place, found.data(None).train_features[: found.batch_size])
    layout.load(saving.load(file))
    state = layout.gather()
    if place.rank == 0:
        save_file(state, file.with_name("gathered.safetensors"))


def memory_of_loading(recipe: str, parallel: Parallel, file: Path, place: Place, emit: Emit) -> None:
    """By how many bytes a rank's own memory grows at most while its part of a checkpoint is loaded.

    Pages of the mapped file aren't its own: the system drops them when it likes.
    """
    import threading

    import torch

    from flipper.training import recipes, saving
    from flipper.training.parallel import set_up

    layout = set_up(parallel, recipes.get(recipe), place, torch.zeros(4, 4096))
    before, peak, done = own_memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    layout.load(saving.load(file))
    done.set()
    watcher.join()
    emit(
        {"event": "memory", "rank": place.rank, "peak": max(peak, own_memory()) - before, "now": own_memory() - before}
    )


def own_memory() -> int:
    """This process's anonymous memory in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise LookupError("RssAnon")


def compare_changed_replicas(parallel: Parallel, changes: dict[int, float], place: Place, emit: Emit) -> None:
    """Set the first element of fc3.bias on some ranks; tell every rank's parameters and what comparing them says."""
    import torch

    from flipper.training import recipes
    from flipper.training.parallel import set_up
    from flipper.training.replicas import compare_replicas

    found = recipes.get("digits-mlp")
    torch.manual_seed(1)
    layout = set_up(parallel, found, place, found.data(None).train_features[: found.batch_size])
    layout.load({f"model.{name}": tensor for name, tensor in found.model().state_dict().items()})
    held = dict(layout.module.named_parameters())
    if place.rank in changes:
        held["fc3.bias"].detach()[0] = changes[place.rank]
    seen = compare_replicas(layout)
    values = {name: each.detach().flatten().tolist() for name, each in held.items()}
    emit({"event": "compared", "rank": place.rank, "values": values,
          "seen": (seen.equal, seen.max_abs_difference, seen.rank)})  # fmt: skip
