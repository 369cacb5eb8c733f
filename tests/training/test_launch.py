"""Ranks are launched, followed, and ended: whatever happens, one clear error and no process left."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Queue, forkserver
from pathlib import Path
from typing import Any

import numpy
import pytest
import rank_bodies
from processes import alive, wait_until

from flipper.errors import CheckpointError, EndedError, TrainingError
from flipper.training.launch import run_ranks
from flipper.training.ranks import Body


def run(body: Body, ranks: int, timeout: float = 60) -> list[dict[str, Any]]:
    """The events of a launch, each rank's pid checked to be gone even when it fails."""
    events: list[dict[str, Any]] = []
    try:
        run_ranks(body, ranks, events.append, timeout=timeout)
    finally:
        for event in events:
            if "pid" in event:
                with pytest.raises(ProcessLookupError):
                    os.kill(event["pid"], 0)
    return events


def test_every_rank_runs_once_on_one_thread_in_a_process_of_its_own() -> None:
    events = run(rank_bodies.report, 3)
    assert sorted(event["rank"] for event in events) == [0, 1, 2]
    assert len({event["pid"] for event in events} | {os.getpid()}) == 4
    assert {event["threads"] for event in events} == {1}


def test_gradients_are_summed_in_rank_order_to_the_bit() -> None:
    """Against numpy adding one rank's floats after the other's."""
    events = sorted(run(rank_bodies.ordered_sums, 3), key=lambda event: event["rank"])
    first, *others = (numpy.array(event["mine"], dtype=numpy.float32) for event in events)
    for other in others:
        first = first + other
    for event in events:
        assert numpy.array(event["sum"], dtype=numpy.float32).tobytes() == first.tobytes()


def test_a_failing_rank_ends_the_others_and_its_error_is_one_line() -> None:
    began = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        run(rank_bodies.raise_on_rank_1, 3)
    assert str(caught.value) == "rank 1 of 3: ZeroDivisionError: no"
    assert "raise_on_rank_1" in str(caught.value.__cause__)
    assert time.monotonic() - began < 30


def test_an_error_of_flipper_comes_back_as_itself() -> None:
    with pytest.raises(CheckpointError, match=r"^seven bytes are missing \[truncated\]$") as caught:
        run(rank_bodies.reject_on_all_ranks, 2)
    assert (caught.value.reason, caught.value.exit_code) == ("truncated", 4)


def test_a_killed_rank_is_named() -> None:
    """Not the rank that first noticed a closed connection."""
    with pytest.raises(TrainingError, match=r"^rank 1 of 3 died \(killed by SIGKILL\)$"):
        run(rank_bodies.kill_rank_1, 3)


def test_a_rank_that_somebody_ends_is_told_from_one_that_crashes() -> None:
    with pytest.raises(EndedError, match=r"^rank 1 of 2 died \(killed by SIGTERM\)"):
        run(rank_bodies.terminate_rank_1, 2)
    with pytest.raises(TrainingError) as raised:
        run(rank_bodies.kill_rank_1, 2)
    assert not isinstance(raised.value, EndedError)


def run_in_daemon(told: Queue[Any]) -> None:
    ranks = len(run(rank_bodies.report, 2))
    told.put((ranks, multiprocessing.current_process().daemon))


def test_a_daemonic_process_may_run_ranks_and_stays_daemonic() -> None:
    """As dask's workers are, and those of multiprocessing.Pool."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=run_in_daemon, args=(told,), daemon=True)
    process.start()
    assert told.get(timeout=60) == (2, True)
    process.join(60)
    assert process.exitcode == 0


def test_a_rank_that_hangs_is_noticed_after_the_timeout_and_killed() -> None:
    with pytest.raises(TrainingError, match=r"^rank 1 of 2 is stopped; the others gave up"):
        run(rank_bodies.stop_rank_1, 2, timeout=1.0)


def test_what_ranks_print_stays_out_of_stdout_and_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    run(rank_bodies.chatter, 2)
    assert capfd.readouterr() == ("", "")


def test_a_script_needs_no_guard_and_may_come_from_stdin() -> None:
    """The ranks import what they run by name; they don't run the caller's script again."""
    code = (
        "from flipper.training.run import train\n"
        "from flipper.training.spec import TrainSpec\n"
        "print(train(TrainSpec('digits-mlp', steps=1, seed=1)).steps)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.parametrize("usual", [None, "glibc.malloc.arena_max=2"])
def test_huge_pages_are_asked_for_beside_what_the_user_has_tuned(usual: str | None) -> None:
    """In the ranks; the caller's own environment stays."""
    code = (
        f"import os, sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "import rank_bodies\n"
        "from flipper.training.launch import run_ranks\n"
        "run_ranks(rank_bodies.tell_tunables, 1, lambda event: print(event['tunables']))\n"
        "print(os.environ.get('GLIBC_TUNABLES'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("GLIBC_TUNABLES", None)
    environment.update({} if usual is None else {"GLIBC_TUNABLES": usual})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    wanted = "glibc.malloc.hugetlb=1" if usual is None else f"{usual}:glibc.malloc.hugetlb=1"
    assert (done.stdout, done.stderr) == (f"{wanted}\n{usual}\n", "")


def test_the_folder_for_temporary_files_may_have_a_long_name(tmp_path: Path) -> None:
    """Longer than a socket's path can be; what is put there is removed, but for the cache that torch makes."""
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    code = (
        "from flipper.training.run import train\n"
        "from flipper.training.spec import TrainSpec\n"
        "print(train(TrainSpec('digits-mlp', steps=1, seed=1)).steps)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")] == []


def test_too_few_files_to_start_ranks_with_is_said(tmp_path: Path) -> None:
    """The limit is this process's alone: the server runs already. The ranks that were started end."""
    code = (
        f"import os, resource, sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "import rank_bodies\n"
        "from flipper.training.launch import run_ranks\n"
        "run_ranks(rank_bodies.report, 1, lambda event: None)\n"
        "few = len(os.listdir('/proc/self/fd')) + 7\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))\n"
        "try: run_ranks(rank_bodies.sleep_long, 8, lambda event: None)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "StartError can't start 8 ranks: Too many open files\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("flipper-")] == []


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_server_that_somebody_has_stopped_is_ended_and_the_next_run_has_a_new_one(moment: str) -> None:
    run(rank_bodies.report, 1)
    stopped = server()
    if moment == "before":
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(EndedError, match="ranks can't be forked: somebody has ended the server that does"):
            run(rank_bodies.report, 2)
    else:
        run_ranks(rank_bodies.report, 2, lambda event: os.kill(stopped, signal.SIGSTOP), timeout=60)
    assert wait_until(lambda: not alive(stopped))
    assert len(run(rank_bodies.report, 2)) == 2
    assert server() != stopped


def server() -> int:
    return int(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stops", [False, True])
def test_no_process_outlives_a_killed_launcher(stops: bool, tmp_path: Path) -> None:
    """Nobody tells the ranks: they notice by themselves, and end one that is stopped, and leave no folder."""
    code = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "import rank_bodies\n"
        "from flipper.training.launch import run_ranks\n"
        "run_ranks(rank_bodies.sleep_long, 2, lambda event: print(event['pid'], flush=True))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        assert all(map(alive, pids))
        if stops:
            os.kill(pids[0], signal.SIGSTOP)
        launcher.send_signal(signal.SIGKILL)
        ended = wait_until(lambda: not any(map(alive, pids)))
        if not ended:
            os.kill(pids[0], signal.SIGKILL)
        assert launcher.stdout.read() == b""  # until the fork server, too, has ended
    assert ended
    assert wait_until(lambda: not list(tmp_path.glob("flipper-*")))


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("os.setsid(); (folder / 'pid-odd').touch(); ranks.end_alone(folder)", -signal.SIGKILL),
        ("os.setsid(); ranks.end_alone(folder / 'gone')", -signal.SIGKILL),
        ("ranks.rank_main(None, ranks.Place(1, 2, 'cpu', f'file://{folder}/gone/meet', 9, 1, 2), None, None)", 1),
    ],
    ids=["odd files", "another has removed the folder", "another removed it before this one was forked"],
)
def test_a_rank_whose_launcher_is_gone_ends_quietly_whatever_is_in_its_way(
    call: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "ranks").mkdir()
    assert alone(tmp_path / "ranks", call) == (code, "", "")


def test_a_rank_whose_launcher_is_gone_ends_the_others_but_no_process_that_has_the_number_of_one(
    tmp_path: Path,
) -> None:
    (folder := tmp_path / "ranks").mkdir()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleep, start_new_session=True) as rank, subprocess.Popen(sleep, process_group=0) as other:
        (folder / f"pid-{rank.pid}-{Path(f'/proc/{rank.pid}/stat').read_text('ascii').split()[21]}").touch()
        (folder / f"pid-{other.pid}-1").touch()
        assert alone(folder, "os.setsid(); ranks.end_alone(folder)")[0] == -signal.SIGKILL
        ended, left = rank.wait(60), other.poll()
        other.kill()
    assert (ended, left) == (-signal.SIGKILL, None)
    assert wait_until(lambda: not list(tmp_path.iterdir()))


def test_what_a_recipe_has_started_ends_with_a_rank_that_finds_its_launcher_gone(tmp_path: Path) -> None:
    """When it has something to tell, which may be before its own watch has noticed."""
    (folder := tmp_path / "ranks").mkdir()
    call = (
        "import multiprocessing, rank_bodies; ours, theirs = multiprocessing.Pipe(False); ours.close()\n"
        "place = ranks.Place(0, 1, 'cpu', f'file://{folder}/meet', 60, 0, 1)\n"
        "ranks.rank_main(rank_bodies.start_and_report, place, theirs, None)"
    )
    done = alone(folder, call)
    assert done[0] == -signal.SIGKILL
    assert "Traceback" not in done[2]
    (started,) = (path.name for path in tmp_path.iterdir() if path.name.isdecimal())
    assert wait_until(lambda: not alive(int(started)))
    assert wait_until(lambda: not list(tmp_path.glob("ranks*")))


def test_what_a_rank_has_started_ends_with_it_when_it_fails(tmp_path: Path) -> None:
    """Itself it has ended by then, and leads its process group no more."""
    with pytest.raises(TrainingError, match="no more"):
        run(functools.partial(rank_bodies.start_and_fail, tmp_path), 2)
    assert wait_until(lambda: not any(alive(int(path.name)) for path in tmp_path.iterdir()))


def test_what_a_rank_that_has_ended_had_started_is_ended_by_the_others(tmp_path: Path) -> None:
    (folder := tmp_path / "ranks").mkdir()
    command = ["sh", "-c", "sleep 600 > /dev/null & echo $!"]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
    started = int(leader.communicate()[0])
    (folder / f"pid-{leader.pid}-1").touch()
    assert alive(started)
    assert alone(folder, "os.setsid(); ranks.end_alone(folder)")[0] == -signal.SIGKILL
    assert wait_until(lambda: not alive(started))


def test_a_rank_that_tells_its_process_last_is_ended_by_the_others_though_it_hangs(tmp_path: Path) -> None:
    """Right before the folder goes. It keeps Python's lock, as FileStore does while it waits for such a folder, so that
    no thread of its own can end it."""
    (folder := tmp_path / "ranks").mkdir()
    asked, told = tmp_path / "asked", tmp_path / "told"
    (mv := tmp_path / "mv").write_text(
        f"#!/bin/sh\ntouch {asked}; while [ ! -e {told} ]; do sleep 0.02; done; exec /bin/mv \"$@\"\n", "ascii"
    )
    mv.chmod(0o755)
    late = (
        "import ctypes, os, time; from pathlib import Path; from flipper.training.ranks import tell_process\n"
        f"while not Path({str(asked)!r}).exists(): time.sleep(0.02)\n"
        f"tell_process(Path({str(folder)!r})); Path({str(told)!r}).touch(); ctypes.PyDLL(None).sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", late], env=environment, start_new_session=True) as rank:
        code, _, _ = alone(folder, "os.setsid(); ranks.end_alone(folder)", PATH=f"{tmp_path}:{os.environ['PATH']}")
        ended = wait_until(lambda: not alive(rank.pid), 30)
        rank.kill()
    assert (code, ended) == (-signal.SIGKILL, True)
    assert wait_until(lambda: not list(tmp_path.glob("ranks*")))


def alone(folder: Path, call: str, **environ: str) -> tuple[int, str, str]:
    """The exit code and what is printed of a process that makes this call."""
    text = f"import os, pathlib; from flipper.training import ranks; folder = pathlib.Path({str(folder)!r}); {call}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment, timeout=60)
    return done.returncode, done.stdout, done.stderr
