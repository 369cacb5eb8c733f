"""Commands and all that descends from them: how they end, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from shell_training import alive, until

from flipper.campaigns import keeper
from flipper.campaigns.process_tree import Ended, run_command
from flipper.errors import EndedError, UsageError
from flipper.training.pool import Pool

DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {first}
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
{then}
"""
"""Leaves a process behind as daemons are made: forked twice, in a session of its own, adopted by whoever adopts."""


def run(folder: Path, *words: str, timeout: float = 60) -> Ended:
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return run_command(words, cwd=folder, log=folder / "log", timeout=timeout, scratch=scratch)


def daemon(first: str = "pass", then: str = "pass") -> str:
    return DAEMON.format(first=first, then=then)


@pytest.mark.parametrize(
    ("text", "code", "manner"),
    [
        ("exit 0", 0, "exit code 0"),
        ("exit 7", 7, "exit code 7"),
        ("kill -SEGV $$", -signal.SIGSEGV, "killed by SIGSEGV"),
        ("kill -KILL $$", -signal.SIGKILL, "killed by SIGKILL"),
        ("kill -40 $$", -40, "killed by signal 40"),
    ],
)
def test_how_a_command_ended_is_told(tmp_path: Path, text: str, code: int, manner: str) -> None:
    ended = run(tmp_path, "sh", "-c", text)
    assert (ended.code, ended.manner) == (code, manner)


def test_it_runs_in_its_folder_with_both_streams_in_the_log_and_nothing_to_read(tmp_path: Path) -> None:
    ended = run(tmp_path, "sh", "-c", "pwd; echo wrong >&2; cat; echo done; exit 1")
    assert ended.code == 1
    assert (tmp_path / "log").read_text().splitlines() == [str(tmp_path), "wrong", "done"]


def test_words_reach_it_as_they_are(tmp_path: Path) -> None:
    words = ["a b", "$HOME", "*", "", "'\"", "ö\n"]
    run(tmp_path, sys.executable, "-c", "import sys; print(sys.argv[1:])", *words)
    assert (tmp_path / "log").read_text().strip() == repr(words)


def test_what_cannot_be_started_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    with pytest.raises(UsageError, match=r"can't run .*/text: Exec format error"):
        run(tmp_path, str(tmp_path / "text"))
    with pytest.raises(UsageError, match=r"can't run .*nowhere: No such file or directory"):
        run(tmp_path, str(tmp_path / "nowhere"))


def test_after_its_time_it_is_ended(tmp_path: Path) -> None:
    ended = run(tmp_path, "sh", "-c", "echo $$ > pid; sleep 600 & sleep 600", timeout=1)
    assert ended.code is None
    assert ended.manner == "ended after 1 s"
    assert not alive(int((tmp_path / "pid").read_text()))


def test_one_that_heeds_no_sigterm_and_one_that_is_stopped_are_ended_too(tmp_path: Path) -> None:
    deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); open('deaf', 'w').write(str(os.getpid()))"
    text = f"""
        {sys.executable} -c "{deaf}; time.sleep(600)" &
        sh -c 'echo $$ > stopped; kill -STOP $$' &
        while [ ! -s deaf ] || [ ! -s stopped ]; do sleep 0.01; done
        exit 5
    """
    assert run(tmp_path, "sh", "-c", text).code == 5
    for name in ("deaf", "stopped"):
        assert not alive(int((tmp_path / name).read_text()))


def test_one_that_is_stopped_hears_that_it_is_to_end(tmp_path: Path) -> None:
    text = """
        sh -c 'trap "echo heard > heard; exit" TERM; echo $$ > stopped; kill -STOP $$; sleep 600' &
        while [ ! -s stopped ] || ! grep -q "State:.T" /proc/$(cat stopped)/status; do sleep 0.01; done
    """
    assert run(tmp_path, "sh", "-c", text).code == 0
    assert (tmp_path / "heard").read_text() == "heard\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt what is orphaned below it")
@pytest.mark.parametrize("first", ["pass", "signal.signal(15, signal.SIG_IGN)"])
@pytest.mark.parametrize(("then", "timeout", "code"), [("pass", 60, 0), ("time.sleep(600)", 3, None)])
def test_a_daemon_that_forked_twice_and_left_its_session_is_ended(
    tmp_path: Path, first: str, then: str, timeout: float, code: int | None
) -> None:
    ended = run(tmp_path, sys.executable, "-c", daemon(first, then), str(tmp_path / "pid"), timeout=timeout)
    assert ended.code == code, (tmp_path / "log").read_text()
    assert not alive(int((tmp_path / "pid").read_text()))


LAUNCHER = """
import sys
from pathlib import Path
from flipper.campaigns.process_tree import run_command
folder = Path(sys.argv[1])
run_command(sys.argv[2:], cwd=folder, log=folder / "log", timeout=600, scratch=folder / "scratch")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt what is orphaned below it")
def test_when_the_launching_process_is_killed_all_is_ended_and_its_scratch_folder_removed(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "altered").write_bytes(b"x" * 1000)
    pid = tmp_path / "pid"
    words = [sys.executable, "-c", daemon(then="time.sleep(600)"), str(pid)]
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), *words])
    assert until(lambda: pid.exists() and pid.read_text() != "")
    number = int(pid.read_text())
    assert alive(number)
    launcher.kill()
    launcher.wait()
    assert until(lambda: not alive(number))
    assert until(lambda: not (tmp_path / "scratch").exists())


def test_a_pool_that_is_called_off_ends_its_commands(tmp_path: Path) -> None:
    pool = Pool(2)
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    futures = [pool.submit(run, folder, "sh", "-c", "echo $$ > pid; sleep 600") for folder in folders]
    assert until(lambda: all((folder / "pid").exists() and (folder / "pid").read_text() for folder in folders[:2]))
    assert pool.call_off(60)
    for folder, future in zip(folders[:2], futures, strict=False):
        with pytest.raises(CancelledError, match="called off"):
            future.result()
        assert not alive(int((folder / "pid").read_text()))
    assert futures[2].cancelled()
    assert not (folders[2] / "pid").exists()


def test_a_keeper_that_is_killed_is_no_fault_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(EndedError, match="ended with the process that watched over it"):
        run(tmp_path, "sh", "-c", "kill -KILL $PPID")


def test_many_commands_at_once_have_their_own_ends(tmp_path: Path) -> None:
    pool = Pool(8)
    folders = [tmp_path / str(number) for number in range(16)]
    for folder in folders:
        folder.mkdir()
    futures = [pool.submit(run, f, "sh", "-c", f"sleep 0.2; exit {number}") for number, f in enumerate(folders)]
    assert [future.result().code for future in futures] == list(range(16))
    pool.shutdown()


@pytest.mark.parametrize("words", [["true"], ["no-such-program"]])
def test_a_keeper_whose_reader_is_gone_says_nothing(tmp_path: Path, words: list[str]) -> None:
    job = {"words": words, "cwd": str(tmp_path), "env": {}, "log": str(tmp_path / "log"), "timeout": 60, "scratch": ""}
    read, write = os.pipe()
    os.close(read)
    arguments = [sys.executable, "-I", "-S", keeper.__file__, json.dumps(job)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=write, stderr=subprocess.PIPE) as process:
        os.close(write)
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_processes_are_listed_alike_with_and_without_proc() -> None:
    """Where there is no /proc, ps tells the same."""
    with subprocess.Popen(["sh", "-c", "sleep 600; true"]) as shell:
        assert until(lambda: len(keeper.descendants(shell.pid)) == 1)
        listed = {pid: parent for pid, parent, _ in keeper._processes_by_ps()}
        assert listed[shell.pid] == os.getpid()
        (child,) = keeper.descendants(shell.pid)
        assert listed[child] == shell.pid
        for pid in (child, shell.pid):
            os.kill(pid, signal.SIGKILL)
