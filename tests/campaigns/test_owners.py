"""Locks and scratch folders name their process; what those that are gone have left is taken over or removed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flipper.campaigns import locks, owners
from flipper.campaigns.owners import Owner
from flipper.campaigns.scratch import in_scratch, made_once, scratch
from flipper.errors import OutputError


def ended(code: str = "") -> Owner:
    """A process that is gone, as it saw itself."""
    told = f"{code}\nfrom flipper.campaigns.owners import Owner\nprint(Owner.here().text())"
    out = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    record = json.loads(out)
    return Owner(record["host"], record["process"], record["started"])


def test_a_process_knows_itself_as_the_system_does() -> None:
    mine = Owner.here()
    ticks = Path(f"/proc/{os.getpid()}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    assert (mine.host, mine.process, mine.started) == (socket.gethostname(), os.getpid(), ticks)
    assert not mine.gone
    assert not owners.gone(mine.tag)


def test_who_is_gone_is_known_of_this_host_only() -> None:
    owner = ended()
    assert owner.gone
    assert owners.gone(owner.tag)
    elsewhere = Owner("elsewhere", owner.process, owner.started)
    assert not elsewhere.gone
    assert not owners.gone(elsewhere.tag)
    assert not owners.gone("anything else")


def test_a_number_that_was_given_to_another_process_is_not_mistaken_for_the_first() -> None:
    assert Owner(socket.gethostname(), os.getpid(), "1").gone


def test_an_ended_process_that_nobody_has_reaped_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.DEVNULL) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        start = stat.read_text("utf-8").rpartition(")")[2].split()[19]
        while stat.read_text("utf-8").rpartition(")")[2].split()[0] != "Z":
            pass
        assert Owner(socket.gethostname(), process.pid, start).gone


def test_of_many_that_take_over_a_lock_one_has_it(tmp_path: Path) -> None:
    """Each holds it for a moment, if it gets it, and says so; nobody else may have it meanwhile."""
    lock, holds = tmp_path / "x.lock", tmp_path / "holds"
    code = f"""
import os, time
from pathlib import Path
from flipper.campaigns import locks
from flipper.errors import OutputError
for _ in range(200):
    try:
        locks.take(Path({str(lock)!r}))
    except OutputError:
        continue
    os.close(os.open({str(holds)!r}, os.O_CREAT | os.O_EXCL))
    time.sleep(0.001)
    os.unlink({str(holds)!r})
    if os.getpid() % 2:
        locks.release(Path({str(lock)!r}))
    else:
        os._exit(0)  # leaves its lock
print("whole")
"""
    lock.write_text(ended().text())
    processes = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(8)]
    assert [process.communicate(timeout=60)[1] for process in processes] == [""] * 8
    locks.take(lock)
    assert Owner.read(lock) == Owner.here()
    locks.release(lock)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_released_by_its_owner_only(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    lock.write_text(Owner("elsewhere", 1, "1").text())
    locks.release(lock)
    assert lock.exists()


@pytest.mark.parametrize("process", [2**31, 2**63, 10**21])
def test_a_lock_of_a_number_that_no_process_has_is_taken_over(tmp_path: Path, process: int) -> None:
    lock = tmp_path / "x.lock"
    lock.write_text(Owner(socket.gethostname(), process, "1").text())
    locks.take(lock)
    assert Owner.read(lock) == Owner.here()
    assert not owners.gone(Owner.here().tag)
    assert owners.gone(Owner(socket.gethostname(), process, "1").tag)


@pytest.mark.parametrize(
    "make",
    [
        Path.touch,
        Path.mkdir,
        os.mkfifo,
        lambda lock: lock.symlink_to("nowhere"),
        lambda lock: lock.symlink_to(lock.name),
        lambda lock: lock.write_text("[" * 100_000),
        lambda lock: lock.write_text('{"host": "x", "process": Infinity, "started": "1"}'),
    ],
    ids=["empty", "folder", "pipe", "dangling", "loop", "deep", "infinite"],
)
def test_a_lock_that_cannot_be_read_is_respected(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "x.lock")
    with pytest.raises(OutputError, match=r"another process writes to this campaign; .*x\.lock if it is gone"):
        locks.take(tmp_path / "x.lock")


def test_a_lock_in_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"can't write .*x\.lock"):
        locks.take(tmp_path / "file" / "x.lock")


def test_temporary_files_go_to_one_folder_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch():
        inside = tempfile.gettempdir()
        assert in_scratch(tempfile.gettempdir) == inside
        both = threading.Barrier(2, timeout=60)

        def in_thread() -> None:
            with scratch():
                both.wait()
                found.append(tempfile.gettempdir())
                both.wait()

        found: list[str] = []
        thread = threading.Thread(target=in_thread)
        thread.start()
        both.wait()
        both.wait()
        thread.join()
    assert found == [inside]
    assert Path(inside).parent == tmp_path
    assert Owner.here().tag in inside
    assert tempfile.gettempdir() == str(tmp_path)


def test_the_folder_goes_with_its_process_and_that_of_a_killed_one_at_the_next_start(tmp_path: Path) -> None:
    code = """
import os, signal, sys, tempfile
from flipper.campaigns.scratch import scratch
with scratch():
    open(tempfile.mkdtemp() + "/file", "w").close()
    print(len(os.listdir(os.environ["TMPDIR"])))
    if sys.argv[1] == "kill":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    (tmp_path / "flipper-trial-abcdefgh").mkdir()
    (tmp_path / f"flipper-{Owner('elsewhere', 1, '1').tag}-abcdefgh").mkdir()
    usual = sorted(path.name for path in tmp_path.iterdir())
    for manner, after in (("kill", 3), ("end", 2)):
        done = subprocess.run([sys.executable, "-c", code, manner], env=environment, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("3\n", "")
        assert len(list(tmp_path.iterdir())) == after
    assert sorted(path.name for path in tmp_path.iterdir()) == usual


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    home = tmp_path / "golden" / "ddp:2"
    stale = home.parent / f".ddp:2-flipper-{ended().tag}-01234567"
    foreign = home.parent / f".ddp:2-flipper-{Owner('elsewhere', 1, '1').tag}-01234567"
    for left in (stale, foreign):
        (left / "part").mkdir(parents=True)

    def fail(folder: Path) -> None:
        (folder / "part").touch()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made_once(home, fail)
    assert list(home.parent.iterdir()) == [foreign]
    made_once(home, lambda folder: (folder / "file").write_text("first") and None)
    made_once(home, lambda folder: (folder / "file").write_text("second") and None)
    assert (home / "file").read_text() == "first"
    assert sorted(home.parent.iterdir()) == sorted([home, foreign])


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="can't be written"):
        made_once(tmp_path / "file" / "home", lambda folder: None)
