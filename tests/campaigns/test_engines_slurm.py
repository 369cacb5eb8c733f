"""Campaigns whose runs are jobs of submitit: on its local executor, and on Slurm where there is one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from campaign_processes import SPEC, begin, campaign, stored
from test_engines_dask import KILLER, KILLING

from flipper import toml
from flipper.campaigns.engines import Engine
from flipper.campaigns.engines.slurm import JobExecutor, JobLost
from flipper.campaigns.folder import Campaign, settle
from flipper.campaigns.run import run_campaign
from flipper.campaigns.spec import spec_of
from flipper.errors import EndedError, OutputError, TrainingError, UsageError

submitit = pytest.importorskip("submitit")

PATIENCE = 120.0

TINY = SPEC.replace("trials = 6", "trials = 1").replace("[1, 2]", "[1]").replace('["single", "ddp:2"]', '"ddp:2"')
"""Of few runs, since each job imports torch."""


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module, in jobs."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


class Remembering(submitit.AutoExecutor):  # type: ignore[misc]
    """Keeps the processes of its jobs, which submitit leaves to the system."""

    def submit(self, *call: Any, **options: Any) -> Any:
        job = super().submit(*call, **options)
        self.processes = [*getattr(self, "processes", []), job._process]
        return job


@contextmanager
def jobs(folder: Path, attempts: int = 2, **parameters: Any) -> Iterator[JobExecutor]:
    """An executor whose jobs are processes of this machine."""
    submitting = Remembering(folder / "%j", cluster="local")
    executor = JobExecutor(submitting, parameters, attempts, patience=0.5)
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in getattr(submitting, "processes", []):
            process.wait(PATIENCE)


def lost(error: BaseException) -> bool:
    return isinstance(error, JobLost)


def small(folder: Path, text: str) -> Campaign:
    return settle(spec_of(toml.parse(text)), folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What the local engine stores."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "spec.toml").write_text(TINY)
    assert campaign(folder, "run", "spec.toml", "-q")[0] == 0
    return stored(folder / "small" / "results.sqlite")


def jobs_of(folder: Path) -> list[int]:
    """The processes that make the runs of the jobs of this folder."""
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            line = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0") if name.isdecimal() else []
            if b"submitit.core._submit" in line and str(folder).encode() in b"".join(line):
                found.append(int(name))
    return found


@pytest.mark.slow
def test_jobs_make_the_same_campaign_also_when_some_are_killed(tmp_path: Path, tiny: dict[Any, Any]) -> None:
    found = small(tmp_path, TINY)
    killed: list[int] = []

    def kill() -> None:
        while len(killed) < 3:
            time.sleep(1)
            if new := set(jobs_of(tmp_path)).difference(killed):
                killed.append(new.pop())
                with suppress(ProcessLookupError):
                    os.kill(killed[-1], signal.SIGKILL)

    with jobs(found.folder.jobs, attempts=4) as executor:
        killer = threading.Thread(target=kill)
        killer.start()
        run_campaign(found, Engine(executor, 1, lost))
        killer.join()
    assert stored(found.folder.results()) == tiny
    assert len(killed) == 3
    assert [path for path in found.folder.jobs.iterdir() if path.name != "%j"] == []


@pytest.mark.slow
def test_a_trial_that_always_kills_its_job_is_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(KILLER)
    found = small(tmp_path / "small", KILLING.replace("trials = 6", "trials = 1").replace("trials = 2", "trials = 1"))
    with jobs(found.folder.jobs, attempts=1) as executor:
        progress = run_campaign(found, Engine(executor, 1, lost))
    assert progress.outcomes == {"masked": 1, "crash": 1}
    ((key, run),) = ((k, r) for k, r in stored(found.folder.results()).items() if r["ended"] == "crash")
    assert key[:3] == ("trial", 1, 0)
    assert "ended without a result; what it wrote is in" in run["error"]


def fail(error: Exception) -> None:
    raise error


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def await_the_end(path: str) -> None:
    Path(path).touch()
    time.sleep(1000)


def test_what_a_job_comes_to_is_what_its_call_comes_to(tmp_path: Path) -> None:
    with jobs(tmp_path) as executor:
        good = executor.submit(divmod, 7, 2)
        ranks = executor.submit_ranks(2, divmod, 9, 2)
        ours = executor.submit(fail, OutputError("no space left"))
        theirs = executor.submit(fail, ZeroDivisionError("no\nsecond line"))
        killed = executor.submit(die)
        assert (good.result(PATIENCE), ranks.result(PATIENCE)) == ((3, 1), (4, 1))
        with pytest.raises(OutputError, match=r"^no space left$"):
            ours.result(PATIENCE)
        with pytest.raises(TrainingError, match=r"^job \d+: second line; what it wrote is in .*_0_log\.err$") as raised:
            theirs.result(PATIENCE)
        log = Path(str(raised.value).rpartition(" is in ")[2])
        assert "ZeroDivisionError" in log.read_text("utf-8")
        with pytest.raises(JobLost, match=r"^job \d+ ended without a result; what it wrote is in .*_0_log\.err$"):
            killed.result(PATIENCE)


def test_a_job_that_is_told_to_end_says_so(tmp_path: Path) -> None:
    with jobs(tmp_path) as executor:
        future = executor.submit(await_the_end, str(tmp_path / "began"))
        assert wait_until((tmp_path / "began").exists)
        for process in jobs_of(tmp_path):
            os.kill(process, signal.SIGTERM)
        with pytest.raises(EndedError, match=r"^the job was told to end; .*slurm\.time$"):
            future.result(PATIENCE)


def test_calls_that_are_called_off_leave_no_job(tmp_path: Path) -> None:
    with jobs(tmp_path) as executor:
        first, second = (executor.submit(await_the_end, str(tmp_path / f"began{number}")) for number in (1, 2))
        assert wait_until(lambda: (tmp_path / "began1").exists() and (tmp_path / "began2").exists())
        assert first.cancel()
        assert wait_until(lambda: len(jobs_of(tmp_path)) == 1)
    assert second.cancelled()
    assert wait_until(lambda: jobs_of(tmp_path) == [])
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(pow, 2, 3)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"time": "01:00:00"}, r"slurm\.time must be a whole number of minutes, not '01:00:00'"),
        ({"time": 0}, r"slurm\.time must be a whole number of minutes, not 0"),
        ({"colour": "red"}, r"^\[slurm\]: Unknown argument 'colour' for executor 'slurm'"),
        ({"nodes": "two"}, r'^\[slurm\]: Parameter "nodes" expected type'),
    ],
)
def test_what_jobs_cannot_ask_for_is_told(tmp_path: Path, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message), jobs(tmp_path, **parameters):
        pass


def test_what_jobs_ask_for_stands_in_the_campaign_file_and_may_change(tmp_path: Path) -> None:
    found = small(tmp_path, TINY + '[slurm]\npartition = "gpu"\ntime = 30\n')
    assert found.spec.slurm == {"partition": "gpu", "time": 30}
    assert small(tmp_path, TINY + '[slurm]\npartition = "cpu"\n').spec.slurm == {"partition": "cpu"}


@pytest.mark.skipif(shutil.which("srun") is not None, reason="there is a Slurm here")
def test_where_there_is_no_slurm_it_is_told(tmp_path: Path) -> None:
    code, out, err = campaign(tmp_path, "run", "spec.toml", "-q", "--engine", "slurm")
    assert (code, out) == (2, "")
    assert err.startswith('flipper: error: --engine slurm: Could not detect "srun"')
    assert err.count("\n") == 1


def queue() -> list[str]:
    return subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout.splitlines()


def without_slurm() -> bool:
    if shutil.which("sinfo") is None:
        return True
    return "idle" not in subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(without_slurm(), reason="there is no Slurm with a node to spare here")
def test_slurm_makes_the_same_campaign(tmp_path: Path, tiny: dict[Any, Any]) -> None:
    """Jobs that are killed and a campaign that is ended included. The folder has to be one that nodes see."""
    (tmp_path / "spec.toml").write_text(TINY)
    process = begin(tmp_path, "run", "spec.toml", "-q", "--engine", "slurm", "--set", "slurm.time=10")
    assert wait_until(lambda: bool(jobs_of(tmp_path)))
    os.kill(jobs_of(tmp_path)[0], signal.SIGKILL)
    assert wait_until(lambda: any("trial" in key for key in stored(tmp_path / "small" / "results.sqlite")))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert wait_until(lambda: queue() == [] and jobs_of(tmp_path) == [])
    code, out, err = campaign(tmp_path, "run", "spec.toml", "-q", "--engine", "slurm", "--set", "slurm.time=10")
    assert (code, err, json.loads(out)["trials"]) == (0, "", 2)
    assert stored(tmp_path / "small" / "results.sqlite") == tiny
    assert list((tmp_path / "small" / "jobs").iterdir()) == []


def test_the_engine_is_imported_without_submitit() -> None:
    code = "import sys; sys.modules['submitit'] = None; import flipper.campaigns.engines.slurm"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
