"""The benchmark's parts on training: step time, the pool's trials, and resuming from a large state."""

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from measure import Row, run, show, work

RECIPE, LAYOUT = "mnist5k-cnn", "ddp:2"
TORCHRUN = Path(sys.executable).with_name("torchrun")
SCRIPT = Path(__file__).with_name("torchrun_ddp.py")


def steps(folder: Path, rounds: int, count: int) -> None:
    """A step's time under DDP, by turns with a script that a user would write by hand for torchrun."""
    native, ordered, theirs = [], [], []
    for _ in range(rounds):
        theirs.append(_by_hand(count))
        native.append(work("steps", RECIPE, LAYOUT, "native", count))
        ordered.append(work("steps", RECIPE, LAYOUT, "ordered", count))
    name = f"a step of {RECIPE}, {LAYOUT}"
    hand = min(theirs)
    show([
        Row(f"{name}, --allreduce native", min(native), "torchrun script", hand, 1.05),
        Row(f"{name}, --allreduce ordered", min(ordered), "torchrun script", hand, None),
    ])  # fmt: skip


def _by_hand(count: int) -> float:
    """Seconds a step in the middle of a run, as rank 0 of the script sees it."""
    command = (TORCHRUN, "--nproc-per-node", "2", SCRIPT, RECIPE, str(count))
    return float(json.loads(run(*command, quiet=False).output.splitlines()[-1]))


def trials(folder: Path, rounds: int) -> None:
    """Trials of two ranks and three epochs: the pool, against torchrun for each."""
    command = (TORCHRUN, "--nproc-per-node", "2", "-m", "flipper", "train", "digits-cnn", "--parallel", "ddp:2")
    alone = []
    for _ in range(2):
        start = perf_counter()
        subprocess.run([*map(str, command), "--steps", "66", "--seed", "1"], check=True, capture_output=True)
        alone.append(perf_counter() - start)
    pooled = work("pool", 4 * rounds, 66)
    show([Row("a trial, digits-cnn, ddp:2, 66 steps, pool", pooled, "torchrun a trial", min(alone), 0.2)])


def resume(folder: Path, rounds: int, megabytes: int) -> None:
    """Taking up a model with Adam's state, against torch.load(mmap=True) and load_state_dict of the same bytes."""
    ours, theirs = folder / "state.pt", folder / "plain.pt"
    work("make_state", ours, theirs, megabytes)
    pairs = [(work("resume", ours, megabytes), work("load_state", theirs, megabytes)) for _ in range(rounds)]
    (own, peak), (other, _) = (min(column) for column in zip(*pairs, strict=True))
    name = f"resume of a state of {megabytes} MB"
    show([
        Row(name, own, "torch.load(mmap=True), load_state_dict", other, 1.5),
        Row(f"{name}, memory that it adds", peak, "state", megabytes, 1.5, unit="MB"),
    ])  # fmt: skip
    ours.unlink()
    theirs.unlink()
