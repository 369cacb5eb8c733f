"""Campaigns on a dask cluster: real worker processes under nannies, killed in mid-trial, and trials that kill them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from campaign_processes import SPEC, begin, campaign, number_of, stored

pytest.importorskip("distributed")

PATIENCE = 120.0

KILLER = """
import os, signal
import torch
from torch import nn
from flipper.training import Data, Recipe, accuracy

class Sensitive(nn.Module):
    '''Passes on what is finite; else the process that launched this rank dies: its server's parent, dask's worker.'''

    def forward(self, values):
        if not bool(values.isfinite().all()):
            with open(f"/proc/{os.getppid()}/stat") as file:
                os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
        return values

def data(folder):
    features = torch.rand(96, 4, generator=torch.Generator().manual_seed(1))
    targets = (features.sum(dim=1) > 2).long()
    return Data(features[:64], targets[:64], features[64:], targets[64:])

def model():
    return nn.Sequential(nn.Linear(4, 8), Sensitive(), nn.ReLU(), nn.Linear(8, 2))

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

OWN = Recipe("own", model, data, nn.functional.cross_entropy, accuracy, sgd, 16)
"""

KILLING = """
[campaign]
name = "small"
recipe = "own.py:OWN"
inject_epoch = 1
epochs = 3
tolerance = 0.1
[axes]
parallel = "single"
layer = "0.weight"
[[slices]]
bits = "mantissa"
trials = 6
[[slices]]
effect = "scale:1e60"
trials = 2
"""
"""Of the second cell each trial makes a weight infinite, and so kills its worker."""


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds


@contextmanager
def cluster(workers: int = 2, threads: int = 1, failures: int = 3) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a cluster, and its process, which is the scheduler."""
    script = Path(__file__).with_name("dask_cluster.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(workers), str(threads), str(failures)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
        process.stdin.close()
        try:
            process.wait(60)
        finally:
            process.kill()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[1])


def workers_at_work(process: subprocess.Popen[str]) -> list[int]:
    """The workers of a cluster that have ranks below them now: a rank writes to a log of its number."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and os.readlink(f"/proc/{name}/fd/2").endswith("/rank-0.log"):
                worker = parent_of(parent_of(int(name)))  # the server is between
                if process.pid in (parent_of(worker), parent_of(parent_of(worker))):
                    found.append(worker)
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What the local engine stores."""
    folder = tmp_path_factory.mktemp("whole")
    assert campaign(folder, "run", "spec.toml", "-q")[0] == 0
    return stored(folder / "small" / "results.sqlite")


@pytest.mark.slow
def test_workers_killed_in_mid_trial_lose_and_double_nothing(tmp_path: Path, whole: dict[Any, Any]) -> None:
    database = tmp_path / "small" / "results.sqlite"
    with cluster() as (address, scheduler):
        process = begin(tmp_path, "run", "spec.toml", "-q", "--engine", "dask", "--scheduler", address)
        for count in (1, 8, 16):
            assert wait_until(lambda: number_of(database) >= count and bool(workers_at_work(scheduler)))  # noqa: B023
            os.kill(workers_at_work(scheduler)[0], signal.SIGKILL)
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "")
        assert json.loads(out)["trials"] == 24
        assert stored(database) == whole
        assert workers_at_work(scheduler) == []


@pytest.mark.slow
def test_a_trial_that_always_kills_its_worker_is_a_crash_and_the_campaign_ends(tmp_path: Path) -> None:
    """Those that waited on the same worker, and were lost with it each time, are no crashes."""
    (tmp_path / "own.py").write_text(KILLER)
    (tmp_path / "spec.toml").write_text(KILLING)
    with cluster(failures=0) as (address, _):
        code, out, err = campaign(tmp_path, "run", "spec.toml", "-q", "--engine", "dask", "--scheduler", address)
    assert (code, err) == (0, "")
    assert json.loads(out)["outcomes"] == {"masked": 6, "crash": 2}
    runs = stored(tmp_path / "small" / "results.sqlite")
    for (kind, cell, *_), run in runs.items():
        if kind == "trial":
            assert (run["ended"] == "crash") == (cell == 1)
            assert (run["error"] or "").startswith("its worker died: Attempted to run task" if cell else "")


@pytest.mark.slow
def test_a_scheduler_that_dies_ends_the_campaign_with_one_line_and_it_goes_on_elsewhere(
    tmp_path: Path, whole: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT", "3s")
    database = tmp_path / "small" / "results.sqlite"
    with cluster() as (address, scheduler):
        process = begin(tmp_path, "run", "spec.toml", "-q", "--engine", "dask", "--scheduler", address)
        assert wait_until(lambda: number_of(database) >= 2)
        os.killpg(scheduler.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("flipper: error: ")
    assert err.endswith("; what had finished is kept, run again to go on\n")
    assert err.count("\n") == 1
    kept = stored(database)
    assert kept == {key: whole[key] for key in kept}
    assert campaign(tmp_path, "run", "spec.toml", "-q")[0] == 0
    assert stored(database) == whole


@pytest.mark.slow
def test_a_client_that_has_given_up_its_scheduler_takes_no_runs_and_ends_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which a campaign meets that is busy for longer than the client tries to connect again."""
    import dask

    from flipper.campaigns.engines.dask import dask_engine

    def is_broken() -> bool:
        try:
            return engine.executor.submit(time.sleep, 0) is None
        except BrokenExecutor as error:
            return str(error) == "the dask scheduler is gone"

    with (
        dask.config.set({"distributed.comm.timeouts.connect": "3s"}),
        cluster() as (address, scheduler),
        dask_engine(address) as engine,
    ):
        assert callable(engine.at_once)
        assert engine.at_once() == 2
        future = engine.executor.submit(time.sleep, 60)
        os.killpg(scheduler.pid, signal.SIGKILL)
        assert wait_until(is_broken)
        assert future.cancelled()
        assert engine.at_once() == 2
    assert caplog.records == []


@pytest.mark.slow
def test_ctrl_c_ends_a_campaign_on_a_cluster_which_stays(tmp_path: Path, whole: dict[Any, Any]) -> None:
    database = tmp_path / "small" / "results.sqlite"
    with cluster() as (address, scheduler):
        process = begin(tmp_path, "run", "spec.toml", "-q", "--engine", "dask", "--scheduler", address)
        assert wait_until(lambda: number_of(database) >= 2)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, err.strip()) == (128 + signal.SIGINT, "", "")
        kept = stored(database)
        assert 2 <= number_of(database) < 24
        assert kept == {key: whole[key] for key in kept}
        assert scheduler.poll() is None
        code, _, err = campaign(tmp_path, "run", "spec.toml", "-q", "--engine", "dask", "--scheduler", address)
        assert (code, err) == (0, "")
    assert stored(database) == whole


def alone(path: str, seconds: float) -> int:
    """Fails where another has this path at the same time."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    time.sleep(seconds)
    os.unlink(path)
    return os.getpid()


def test_a_worker_makes_as_many_runs_at_once_as_their_ranks_fit_into_its_threads(tmp_path: Path) -> None:
    from flipper.campaigns.engines import open_engine

    with cluster(workers=1, threads=2) as (address, _), open_engine("dask", None, address) as engine:
        assert callable(engine.at_once)
        assert engine.at_once() == 2
        submit = engine.executor.submit_ranks  # type: ignore[attr-defined]
        wide = [submit(2, alone, str(tmp_path / "wide"), 0.2) for _ in range(4)]
        assert len({future.result(PATIENCE) for future in wide}) == 1
        too_wide = submit(64, alone, str(tmp_path / "wide"), 0.0)
        assert too_wide.result(PATIENCE)
        narrow = [submit(1, both, str(tmp_path / f"narrow{number}"), str(tmp_path / f"narrow{1 - number}"))
                  for number in range(2)]  # fmt: skip
        assert [future.result(PATIENCE) for future in narrow] == [True, True]
        assert engine.executor.submit(pow, 2, 3).result(PATIENCE) == 8
        with pytest.raises(ZeroDivisionError):
            engine.executor.submit(divmod, 1, 0).result(PATIENCE)


def test_threads_of_a_worker_that_ask_at_the_same_time_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pools would make twice the runs at once."""
    from flipper.campaigns.engines import dask

    started = []

    class Slow(dask.Pool):
        def __init__(self, slots: int) -> None:
            time.sleep(0.2)
            started.append(self)
            super().__init__(slots)

    monkeypatch.setattr(dask, "Pool", Slow)
    with ThreadPoolExecutor(4) as threads:
        pools = set(threads.map(dask._pool, [1 << 20] * 4))
    assert [len(pools), len(started)] == [1, 1]


def both(mine: str, other: str) -> bool:
    """Whether another does this at the same time."""
    Path(mine).touch()
    return wait_until(lambda: os.path.exists(other))


def test_a_scheduler_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT", "1s")
    for address, reason in (("tcp://127.0.0.1:1", "Timed out"), ("nonsense://x", "unknown address scheme")):
        code, out, err = campaign(tmp_path, "run", "spec.toml", "-q", "--engine", "dask", "--scheduler", address)
        assert (code, out) == (1, "")
        assert err.startswith(f"flipper: error: no dask scheduler answers at {address}: {reason}")
        assert err.count("\n") == 1


def test_what_the_engine_needs_is_told_where_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    for engine, package in ((["dask", "--scheduler", "tcp://127.0.0.1:1"], "distributed"), (["slurm"], "submitit")):
        arguments = ["campaign", "run", "spec.toml", "-q", "--engine", *engine]
        code = f"import sys; sys.modules[{package!r}] = None; from flipper.cli import main; main({arguments!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        extra = engine[0]
        assert done.stderr == (
            f"flipper: error: --engine {extra} needs {package}; pip install 'flipper-ckpt[{extra}]'\n"
        )
