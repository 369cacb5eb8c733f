"""What tests of runs that really die share: checkpoints read without flipper, and processes looked at from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The parameters in the checkpoint of a step, by name."""
    state = load_file(folder / f"step-{step:06d}.safetensors")
    return {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(value, other[name]) for name, value in one.items())


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_launcher_after_a_death(folder: Path, *options: str) -> None:
    """Kill the process that launched an endless run in which a rank dies, as soon as it tells of that; wait until no
    process of the run is left. options: of flipper train, its layout, kill and recovery."""
    command = [
        sys.executable, "-m", "flipper", "train", "digits-mlp", "--steps", "1000000", "--seed", "1", "-q",
        "--metrics", "m.jsonl", *options,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(folder)}
    process = subprocess.Popen(command, cwd=folder, env=environment)
    metrics = folder / "m.jsonl"
    wait_for(lambda: metrics.exists() and '"rank-lost"' in metrics.read_text())
    process.kill()
    process.wait()
    wait_for(lambda: not marked(f"TMPDIR={folder}"))


def marked(mark: str) -> list[str]:
    """The processes that have this in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append(process.name)
            except OSError:
                continue
    return found
