"""What tests of runs that really die share: checkpoints read without flipper, and processes looked at from outside."""

from __future__ import annotations

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
