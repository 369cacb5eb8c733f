"""A checkpoint written by hand and campaigns over train.sh, a framework without Python."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flipper.campaigns.engines import open_engine
from flipper.campaigns.folder import planned
from flipper.campaigns.results import Results, load_results
from flipper.campaigns.run import run_campaign
from flipper.campaigns.spec import spec_of

SCRIPT = Path(__file__).with_name("train.sh")

LINE = "./train.sh {checkpoint} {metrics} none jsonl "


def weights_file(path: Path, values: list[float]) -> Path:
    """A safetensors file with one tensor `layer.weight`, as its documentation lays it out."""
    entry = {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, 4 * len(values)]}
    header = json.dumps({"layer.weight": entry}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack(f"<{len(values)}f", *values))
    return path


def weights_in(path: Path) -> list[float]:
    """What `weights_file` wrote, or flipper in its place."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    return list(struct.unpack_from(f"<{(len(data) - 8 - size) // 4}f", data, 8 + size))


def project(folder: Path) -> Path:
    """A folder with train.sh and a checkpoint of ten weights."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SCRIPT, folder)
    weights_file(folder / "weights.safetensors", [0.5 + number / 16 for number in range(10)])
    return folder


def document(
    commands: dict[str, str], axes: dict[str, Any], metrics: dict[str, Any], **campaign: Any
) -> dict[str, Any]:
    """A campaign file's tables. By default every weight's exponent is struck at its top, which throws it far off."""
    usual = {"checkpoint": "weights.safetensors", "bits": "exponent-msb"}
    values = {"name": "own", "trials": 2, "tolerance": 0.05, "timeout": 30, **campaign}
    tables = {"campaign": values, "axes": {**usual, **axes}, "commands": commands}
    return {**tables, "metrics": metrics} if metrics else tables


def run(
    folder: Path,
    commands: dict[str, str],
    axes: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    workers: int = 2,
    keep: bool = False,
    **campaign: Any,
) -> tuple[Results, list[str]]:
    """Run a campaign in folder/out; its results, and what was noted on the way."""
    spec = spec_of(document(commands, axes or {}, metrics or {}, **campaign), folder)
    settled = planned(spec, folder / "out")
    with open_engine("local", workers) as engine:
        progress = run_campaign(settled, engine, keep=keep)
    return load_results(settled, detail=True), progress.notes


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("ascii")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it holds within this time."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds
