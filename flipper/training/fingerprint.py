"""Fingerprint: what the bits of a run depend on beside its seed: the kind of machine, and torch."""

from __future__ import annotations

import functools
import os
import platform
from typing import Any

from flipper.training.ranks import Emit, Place


def fingerprint(device: str) -> dict[str, str]:
    """The processor's name, the instructions that torch uses on it, torch's version, threads and device of this rank.

    device: as torch names its type, "cpu" or "cuda". Imports torch.
    """
    import torch

    return {
        "cpu": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),  # of a type of torch's own, which the launching process would have to import
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


@functools.cache
def machine_fingerprint(device: str = "cpu") -> dict[str, str]:
    """The same of this machine, asked of a fresh rank, so that the calling process need not import torch.

    device: auto, cpu or cuda, as for a training run.
    """
    from flipper.training.launch import run_ranks

    told: list[dict[str, Any]] = []
    run_ranks(_tell, 1, told.append, device=device)
    return {str(key): str(value) for key, value in told[0]["fingerprint"].items()}


def _tell(place: Place, emit: Emit) -> None:
    import torch

    cuda = place.device != "cpu" and torch.cuda.is_available()
    emit({"event": "fingerprint", "fingerprint": fingerprint("cuda" if cuda else "cpu")})


def processor() -> str:
    """The processor's model name, as the kernel gives it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or os.name
