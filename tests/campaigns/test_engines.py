"""Any executor makes the same campaign; what breaks is told, and what had finished is kept."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from campaign_processes import SPEC, campaign, number_of, stored

from flipper import toml
from flipper.campaigns.coordinator import Progress
from flipper.campaigns.engines import Engine, open_engine
from flipper.campaigns.folder import Campaign, settle
from flipper.campaigns.run import run_campaign
from flipper.campaigns.spec import spec_of
from flipper.errors import EndedError, TrainingError, UsageError


def small(folder: Path, text: str = SPEC) -> Campaign:
    return settle(spec_of(toml.parse(text)), folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What the local engine stores."""
    found = small(tmp_path_factory.mktemp("whole"))
    with open_engine("local") as engine:
        run_campaign(found, engine)
    return stored(found.folder.results())


def processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))


@pytest.mark.parametrize("pool", [lambda: ThreadPoolExecutor(2), processes], ids=["threads", "processes"])
def test_an_executor_of_the_standard_library_makes_the_same_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[Any, Any], pool: Callable[[], Executor]
) -> None:
    """From a relative folder, which workers need not be in."""
    monkeypatch.chdir(tmp_path)
    found = small(Path("relative"))
    with pool() as executor:
        progress = run_campaign(found, Engine(executor, 2))
    assert sum(progress.outcomes.values()) == 24
    assert stored(tmp_path / "relative" / "results.sqlite") == whole


MPI_POOL = """
from pathlib import Path
from mpi4py.futures import MPIPoolExecutor
from flipper.campaigns.engines import Engine
from flipper.campaigns.folder import campaign_of
from flipper.campaigns.run import run_campaign

if __name__ == "__main__":
    with MPIPoolExecutor() as pool:
        print(run_campaign(campaign_of(Path("spec.toml")), Engine(pool, 2)).done)
"""


@pytest.mark.slow
def test_so_do_the_workers_of_an_mpi_job(tmp_path: Path, whole: dict[Any, Any]) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "spec.toml").write_text(SPEC)
    (tmp_path / "pool.py").write_text(MPI_POOL)
    mpirun = [Path(sys.executable).with_name("mpirun"), "--oversubscribe", "--bind-to", "none", "-n", "3"]
    done = subprocess.run(
        [*mpirun, sys.executable, "-m", "mpi4py.futures", "pool.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "24\n"), done.stderr
    assert stored(tmp_path / "small" / "results.sqlite") == whole


def test_a_pool_whose_process_dies_ends_the_campaign_which_goes_on_with_another(
    tmp_path: Path, whole: dict[Any, Any]
) -> None:
    found = small(tmp_path)

    def kill(progress: Progress) -> None:
        if progress.stage == "trial" and progress.done == 3:
            os.kill(next(iter(executor._processes)), signal.SIGKILL)

    with processes() as executor, pytest.raises(TrainingError, match=r"^the executor broke: .* run again to go on$"):
        run_campaign(found, Engine(executor, 2), on_progress=kill)
    kept = stored(found.folder.results())
    assert kept == {key: whole[key] for key in kept}
    assert 3 <= number_of(found.folder.results()) < 24
    with open_engine("local", 1) as engine:
        run_campaign(found, engine)
    assert stored(found.folder.results()) == whole


class Losing(ThreadPoolExecutor):
    """Raises an error instead of the result of a call, the first or each time that it gets it."""

    def __init__(self, error: Exception, chosen: Callable[[tuple[Any, ...]], bool], times: int) -> None:
        super().__init__(2)
        self.error, self.chosen, self.times = error, chosen, times
        self.at_work, self.most = 0, [0]
        self.lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with self.lock:
            self.at_work += 1
        return super().submit(self.call, fn, args)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            if self.chosen(args) and self.times > 0:
                self.times -= 1
                self.most.append(self.at_work)
                raise self.error
            return fn(*args)
        finally:
            with self.lock:
                self.at_work -= 1


def trial_5(args: tuple[Any, ...]) -> bool:
    """Of cell 0: run_trial(campaign, cell, trial, ...)."""
    return args[0].__name__ == "run_trial" and args[2].number == 0 and args[3] == 5


def test_a_trial_whose_worker_died_is_made_again_alone_before_it_is_called_a_crash(
    tmp_path: Path, whole: dict[Any, Any]
) -> None:
    for times, name in ((1, "once"), (2, "twice")):
        found = small(tmp_path / name)
        with Losing(ConnectionError("gone"), trial_5, times) as executor:
            run_campaign(found, Engine(executor, 2, lambda error: isinstance(error, ConnectionError)))
        runs = stored(found.folder.results())
        assert runs.keys() == whole.keys()
        different = {key: run for key, run in runs.items() if run != whole[key]}
        if times == 1:
            assert not different
            continue
        ((key, run),) = different.items()
        assert (key[:3], run["ended"], run["error"]) == (("trial", 0, 5), "crash", "its worker died: gone")
        assert executor.most[-1] == 1


def test_a_golden_run_whose_worker_dies_each_time_ends_the_campaign(tmp_path: Path) -> None:
    found = small(tmp_path)
    with (
        Losing(ConnectionError("gone"), lambda args: args[0].__name__ == "run_golden", 10) as executor,
        pytest.raises(TrainingError, match=r"^golden run of single .*: its worker died, each time: gone$"),
    ):
        run_campaign(found, Engine(executor, 2, lambda error: isinstance(error, ConnectionError)))


def test_a_trial_that_somebody_ended_is_made_again_and_is_no_crash(tmp_path: Path, whole: dict[Any, Any]) -> None:
    found = small(tmp_path)
    with Losing(EndedError("rank 0 of 1 died (killed by SIGTERM)"), trial_5, 1) as executor:
        run_campaign(found, Engine(executor, 2))
    assert stored(found.folder.results()) == whole


def test_a_run_that_the_executor_calls_off_is_not_passed_over(tmp_path: Path) -> None:
    found = small(tmp_path)

    class Cancelling(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if args[0].__name__ == "run_null":
                future: Future[Any] = Future()
                future.cancel()
                future.set_running_or_notify_cancel()
                return future
            return super().submit(fn, *args)

    with Cancelling(2) as executor, pytest.raises(TrainingError, match=r"^null run of .*: the executor called it off"):
        run_campaign(found, Engine(executor, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "dask"], "--scheduler ADDRESS goes with --engine dask"),
        (["--scheduler", "tcp://127.0.0.1:1"], "--scheduler ADDRESS goes with --engine dask"),
        (["--engine", "cloud"], "'cloud' is not one of 'local', 'dask', 'slurm'"),
        (["--shard", "3/2"], "--shard '3/2' is not of the form I/N"),
        (["--engine", "slurm", "--set", "slurm.time='1:00'"], ""),
    ],
)
def test_options_that_make_no_sense_are_told(tmp_path: Path, arguments: list[str], message: str) -> None:
    code, out, err = campaign(tmp_path, "run", "spec.toml", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("flipper: error: ")
    assert message in err
    assert "Traceback" not in err


def test_an_unknown_engine_is_told() -> None:
    with pytest.raises(UsageError, match="no engine 'cloud'; known: local, dask, slurm"), open_engine("cloud"):
        pass


def test_temporary_files_of_workers_go_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    found = small(tmp_path / "campaign", SPEC.replace("trials = 6", "trials = 1"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with processes() as executor:
        run_campaign(found, Engine(executor, 2))
    names = [path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith(("flipper", "pymp"))]
    assert len(names) == 1  # this process's own, until it ends
    assert f"-{os.getpid()}-" in names[0]
