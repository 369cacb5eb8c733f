"""The benchmark's parts on campaigns: what they add to training, workers, and thousands of stored trials."""

import json
import sys
from pathlib import Path

from measure import Row, flipper, run, show, work

OWN = Path(sys.executable).with_name("flipper")

SPEC = """
[campaign]
name = "{name}"
seed = 1
recipe = "{recipe}"
inject_epoch = 1
epochs = {epochs}
trials = {trials}
tolerance = 0.02
[axes]
parallel = "{parallel}"
role = "parameter"
bits = "mantissa"
count = 10
"""


def spec(folder: Path, name: str, **values: object) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(SPEC.format(name=name, **values), "utf-8")
    return path


def added(folder: Path, trials: int, rounds: int = 2) -> None:
    """A campaign's time over the bare training time of its trials: the same struck files, trained by `train` alone.

    By turns, since other machines' work on the same host comes and goes.
    """
    path = spec(folder, "added", recipe="mnist5k-cnn", epochs=2, trials=trials, parallel="ddp:2")
    whole, bare = [], []
    for each in range(rounds):
        out = folder / f"added-{each}"
        flipper("campaign", "run", path, "--out", out, "--set", "trials=1", "-q")
        whole.append(flipper("campaign", "run", path, "--out", out, "--keep", "-q").wall - start_up())
        bare.append(work("bare_trials", out))
    show([Row(f"{trials - 1} trials, mnist5k-cnn, ddp:2, 31 steps", min(whole), "training alone", min(bare), 1.1)])


def start_up() -> float:
    """What a run that has nothing to do takes: Python, and the server that imports torch."""
    return float(work("server_start"))


def workers(folder: Path, trials: int, rounds: int = 2) -> None:
    """Trials of one rank, one or two at once; of two ranks, likewise: there both are made one after another."""
    for parallel, most in (("single", 1 / 1.7), ("ddp:2", 1.0)):
        pairs = [tuple(_worked(folder, parallel, trials, count, each) for count in (1, 2)) for each in range(rounds)]
        one, two = (min(seconds) for seconds in zip(*pairs, strict=True))
        show([Row(f"{trials - 1} trials, digits-cnn, {parallel}, --workers 2", two, "--workers 1", one, most)])


def _worked(folder: Path, parallel: str, trials: int, count: int, number: int) -> float:
    """Seconds that so many workers take for all trials but one."""
    name = f"{parallel.replace(':', '')}-{count}-{number}"
    path, out = spec(folder, name, recipe="digits-cnn", epochs=4, trials=trials, parallel=parallel), folder / name
    flipper("campaign", "run", path, "--out", out, "--set", "trials=1", "-q")
    return flipper("campaign", "run", path, "--out", out, "--workers", count, "-q").wall - start_up()


def stored(folder: Path, trials: int) -> None:
    """The report and the status of very many stored trials."""
    out = folder / "stored"
    work("made_trials", out, trials)
    report = run(OWN, "campaign", "report", out, "-q")
    status = min((run(OWN, "campaign", "status", out, quiet=False) for _ in range(3)), key=lambda usage: usage.cpu)
    assert json.loads(status.output)["trials"] == trials
    show([
        Row(f"report of {trials} trials", report.wall, "limit", 15),
        Row(f"report of {trials} trials, peak memory", report.memory, "limit", 500, unit="MB"),
        Row(f"status of {trials} trials, CPU", status.cpu, "limit", 0.3),
    ])  # fmt: skip
