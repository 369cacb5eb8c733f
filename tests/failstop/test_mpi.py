"""Ranks of MPI that really die under mpirun with ULFM: what the survivors come to, against training by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from by_hand import Death, trained
from real_runs import marked, same, wait_for, weights

from flipper.errors import TrainingError, UsageError
from flipper.failstop import mpirun
from flipper.failstop.kills import Kill
from flipper.failstop.run import FailstopResult, train_through
from flipper.failstop.spec import FailstopSpec
from flipper.training.layouts import Parallel
from flipper.training.run import train
from flipper.training.spec import Event, TrainSpec

pytest.importorskip("mpi4py", reason="mpi4py is not installed")


def run(
    ranks: int, kills: tuple[str, ...], recovery: str | None, folder: Path, *, recipe: str = "digits-mlp",
    events: list[Event] | None = None, timeout: float = 30.0, min_ranks: int = 1,
) -> FailstopResult:  # fmt: skip
    spec = TrainSpec(recipe, Parallel("mpi", ranks), steps=8, seed=1, save=folder, save_every=4, timeout=timeout)
    job = FailstopSpec(spec, tuple(map(Kill.parse, kills)), recovery, min_ranks=min_ranks)
    return train_through(job, (events if events is not None else []).append)


def test_without_a_death_it_is_distributed_data_parallel_bit_for_bit(tmp_path: Path) -> None:
    """With BatchNorm and dropout."""
    there = train(TrainSpec("digits-cnn", Parallel("ddp", 3), steps=8, seed=1))
    here = run(3, (), None, tmp_path, recipe="digits-cnn")
    assert (here.state_digest, here.loss, here.accuracy) == (there.state_digest, there.loss, there.accuracy)


CASES: dict[str, tuple[int, tuple[str, ...], tuple[Death, ...]]] = {
    "rank 0": (3, ("rank:0@step:5:bucket:1",), (Death(0, 5, 1),)),
    "two, one after the other": (
        4, ("rank:1@step:3:bucket:2", "rank:3@step:6:bucket:0"), (Death(1, 3, 2), Death(3, 6, 0)),
    ),
    "one in the recovery from another": (
        4, ("rank:1@step:3:bucket:1", "rank:2@recovery:1"), (Death(1, 3, 1), Death(2, 3, 1)),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("case", "recovery"), list(zip(CASES, ("rollback", "lossy", "lossy"), strict=True)))
def test_survivors_come_to_what_they_do_by_hand(case: str, recovery: str, tmp_path: Path) -> None:
    ranks, kills, deaths = CASES[case]
    events: list[Event] = []
    result = run(ranks, kills, recovery, tmp_path, events=events)
    assert {lost["rank"] for lost in result.lost} == {death.worker for death in deaths}
    assert result.world_size == ranks - len(deaths)
    assert same(weights(tmp_path, 8), trained(ranks, 8, deaths, recovery))
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 9))
    assert all(event["seconds_to_shrink"] > 0 for event in events if event["event"] == "recovered")


@pytest.mark.slow
def test_restarted_a_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = train(TrainSpec("digits-cnn", Parallel("ddp", 2), steps=8, seed=1))
    result = run(2, ("rank:0@step:6:bucket:1",), "restart", tmp_path, recipe="digits-cnn")
    assert (result.state_digest, len(result.lost), result.world_size) == (whole.state_digest, 1, 2)


@pytest.mark.slow
def test_a_rank_that_hangs_is_killed_after_the_timeout(tmp_path: Path) -> None:
    """MPI itself has no timeout."""
    result = run(3, ("rank:1@step:5:bucket:1,signal:STOP",), "lossy", tmp_path, timeout=3.0)
    assert [lost["rank"] for lost in result.lost] == [1]
    assert same(weights(tmp_path, 8), trained(3, 8, (Death(1, 5, 1),), "lossy"))


@pytest.mark.slow
def test_a_death_that_nobody_is_to_recover_from_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="rank 1 of 2 died"):
        run(2, ("rank:1@step:3",), None, tmp_path)
    with pytest.raises(TrainingError, match="1 of 2 ranks are left: fewer than --min-ranks 2"):
        run(2, ("rank:1@step:3",), "lossy", tmp_path, min_ranks=2)


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mpirun, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"mpi:N needs mpi4py and Open MPI; pip install 'flipper-ckpt\[mpi\]'"):
        run(2, (), None, tmp_path)


def test_an_mpirun_that_knows_no_ulfm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As older ones end: at once, with a word about the option."""
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho 'mpirun: Error: unknown option \"--with-ft\"'\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setattr(mpirun, "_mpirun", lambda: str(other))
    with pytest.raises(TrainingError, match=r"mpirun ended with exit code 1; it wrote: .*unknown option"):
        run(2, (), None, tmp_path)


def begin(folder: Path, layout: str, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A run in this folder, and what all its processes have in their environment."""
    command = [sys.executable, "-m", "flipper", "train", "digits-mlp", "--parallel", layout, "-q", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "FLIPPER_TEST": str(folder)}
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    return process, f"FLIPPER_TEST={folder}"


def words_of(pid: str) -> list[str]:
    """Of a process's command line; none when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed_before_its_ranks_are_ready(tmp_path: Path) -> None:
    process, mark = begin(tmp_path, "mpi:2")
    try:
        wait_for(lambda: folders_of_ranks(mark))
        (folder,) = folders_of_ranks(mark)
        wait_for(lambda: list(folder.glob("pid-*")))
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not marked(mark))
    assert not folder.exists()


@pytest.mark.slow
def test_a_rank_that_dies_before_all_have_begun_ends_the_run_soon(tmp_path: Path) -> None:
    process, mark = begin(tmp_path, "mpi:3", "--recovery", "lossy")
    try:
        wait_for(lambda: len(ranks_among(marked(mark))) == 3)
        os.kill(int(ranks_among(marked(mark))[1]), signal.SIGKILL)
        _, err = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 1
    assert err.startswith("flipper: error: a rank of 3 died before all had begun")
    wait_for(lambda: not marked(mark))


def ranks_among(pids: list[str]) -> list[str]:
    return [pid for pid in pids if words_of(pid)[1:3] == ["-m", "flipper.failstop.mpi_rank"]]


def folders_of_ranks(mark: str) -> set[Path]:
    """Where the ranks that have been started meet."""
    return {Path(words_of(pid)[-1]).parent for pid in ranks_among(marked(mark))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "stopped"), [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGINT, True)]
)
def test_nothing_outlives_the_launcher(number: signal.Signals, stopped: bool, tmp_path: Path) -> None:
    """No rank, stopped or not, no mpirun, and no folder."""
    process, mark = begin(tmp_path, "mpi:2", "--steps", "1000000", "--seed", "1", "--metrics", "m.jsonl")
    metrics = tmp_path / "m.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count('"step"') > 3)
        ranks = {pid: words_of(pid) for pid in ranks_among(marked(mark))}
        assert len(ranks) == 2
        if stopped:
            os.kill(int(min(ranks)), signal.SIGSTOP)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err.strip()) == (-number if number == signal.SIGKILL else 128 + number, "")
    finally:
        process.kill()
    wait_for(lambda: not marked(mark))
    assert not any(Path(words[-1]).parent.exists() for words in ranks.values())
    assert all(json.loads(line) for line in metrics.read_text().splitlines()[:3])
