"""`flipper campaign` as a process of its own, and its database read without flipper."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

SPEC = """
[campaign]
name = "small"
seed = 3
training_seeds = [1, 2]
recipe = "digits-mlp"
inject_epoch = 1
epochs = 2
evaluate_every = 8
trials = 6
null_trials = 6
[axes]
parallel = ["single", "ddp:2"]
bits = "exponent"
role = "parameter"
count = [1, 100]
"""
"""24 trials and 12 null trials, some of each outcome; most of its time goes into importing torch."""


def begin(folder: Path, *arguments: str, temporary: Path | None = None) -> subprocess.Popen[str]:
    """Start `flipper campaign ARGUMENTS` in a process group of its own, with spec.toml in its folder."""
    (folder / "spec.toml").touch()
    if not (folder / "spec.toml").stat().st_size:
        (folder / "spec.toml").write_text(SPEC)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    if temporary is not None:
        environment["TMPDIR"] = str(temporary)
    return subprocess.Popen(
        [sys.executable, "-m", "flipper", "campaign", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def campaign(folder: Path, *arguments: str, temporary: Path | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `flipper campaign ARGUMENTS`."""
    with begin(folder, *arguments, temporary=temporary) as process:
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def stored(database: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Every stored run by what it is, without the seconds that it took."""
    found = {}
    with closing(sqlite3.connect(database)) as connection:
        columns = "kind, cell, trial, parallel, training_seed, fingerprint, summary"
        for *key, summary in connection.execute(f"SELECT {columns} FROM runs"):
            found[tuple(key)] = {k: v for k, v in json.loads(summary).items() if k != "seconds"}
    return found


def number_of(database: Path, kind: str = "trial") -> int:
    """How many runs of a kind are stored; 0 while there is no database, or while its writer is at it."""
    if not database.is_file():
        return 0
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            (count,) = connection.execute("SELECT COUNT(*) FROM runs WHERE kind = ?", (kind,)).fetchone()
    except sqlite3.OperationalError:
        return 0
    return int(count)
