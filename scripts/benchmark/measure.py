"""Measuring: processes with their CPU time and peak memory, and the table that is printed.

Imports the standard library only: a child's peak memory counts what its parent held when it was started.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

WORK = Path(__file__).with_name("work.py")


@dataclass(frozen=True)
class Usage:
    """What a process took: wall and CPU (user and system) in seconds, peak memory in MB, and what it printed."""

    wall: float
    cpu: float
    memory: float
    output: str


def run(*command: str | Path, quiet: bool = True) -> Usage:
    """Run a command to its end; raises RuntimeError with its words when it fails. quiet: throw away its output."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        start = perf_counter()
        process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.DEVNULL if quiet else output, stderr=errors
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        wall = perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            words = " ".join(map(str, command))
            raise RuntimeError(f"{words[:200]}: exit {process.returncode}: {errors.read()[-800:]}")
        output.seek(0)
        return Usage(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output.read())


def work(name: str, *arguments: str | Path | int) -> Any:
    """Run a function of work.py in a process of its own; returns what it returns."""
    return json.loads(run(sys.executable, WORK, name, *map(str, arguments), quiet=False).output)


def flipper(*arguments: str | Path | int) -> Usage:
    """Run the flipper command."""
    return run(Path(sys.executable).with_name("flipper"), *map(str, arguments))


def copy(source: Path, target: Path) -> float:
    """Seconds that cp takes; the copy is removed again."""
    os.sync()
    seconds = run("cp", source, target).wall
    target.unlink()
    return seconds


@dataclass(frozen=True)
class Row:
    """One line of the table: a measure, what it is compared with, and by how much it may exceed that.

    target: greatest ratio of the two; None where the factor itself is the news.
    """

    work: str
    measured: float
    against: str
    limit: float
    target: float | None = 1.0
    unit: str = "s"

    def __str__(self) -> str:
        ratio = self.measured / self.limit
        compared = f"{self.against} {_shown(self.limit, self.unit)}".strip()
        if self.target is None:
            verdict = f"{1 / ratio:.1f}x less" if ratio < 1 else f"{ratio:.1f}x more"
            goal = ""
        else:
            verdict, goal = "ok" if ratio <= self.target else "OVER", f"<= {self.target:g}"
        return f"{self.work:66} {_shown(self.measured, self.unit):>9}  {compared:32} {ratio:8.3f} {goal:>7}  {verdict}"


HEADER = f"{'work':66} {'measured':>9}  {'against':32} {'ratio':>8} {'target':>7}"


def show(rows: Sequence[Row]) -> None:
    """Print rows as soon as they are there."""
    for row in rows:
        print(row, flush=True)


def skipped(what: str, reason: str) -> None:
    """Print a row that could not be measured, and why."""
    print(f"{what:66} {'skipped':>9}  {reason}", flush=True)


def _shown(value: float, unit: str) -> str:
    if unit == "s" and value < 0.1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} {unit}"
