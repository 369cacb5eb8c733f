"""Campaigns that are killed, interrupted, locked out, or meet a damaged database or a full disk: and go on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from campaign_processes import SPEC, begin, campaign, number_of, stored

from flipper.campaigns.store import Store

PATIENCE = 60.0
"""Seconds for what should take a few, on a machine with other things to do."""

ENDLESS = SPEC.replace("epochs = 2", "epochs = 1000000")
"""Its first golden run takes hours."""


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds


def running_with(temporary: Path) -> list[str]:
    """The command lines of all processes whose TMPDIR this is: of a campaign and all that it started."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                state = Path(f"/proc/{name}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
                variables = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                if state != "Z" and f"TMPDIR={temporary}".encode() in variables:
                    found.append(Path(f"/proc/{name}/cmdline").read_text("utf-8", "replace").replace("\0", " "))
    return found


def left_in(temporary: Path) -> list[str]:
    """What is left there, but for torch's own folder."""
    return [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose name is short enough for sockets, which names all processes of a test."""
    folder = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a campaign that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert campaign(folder, "run", "spec.toml", "-q")[0] == 0
    return folder / "small"


def runs_in(folder: Path) -> int:
    return sum(number_of(folder / "small" / "results.sqlite", kind) for kind in ("golden", "null", "trial"))


@pytest.mark.slow
def test_killed_again_and_again_a_campaign_loses_and_doubles_nothing(
    tmp_path: Path, temporary: Path, whole: Path
) -> None:
    """Killed while torch is imported, and at moments among golden runs, null trials and trials that are drawn anew."""
    draw = random.Random()
    waits = [0, *sorted(draw.sample(range(1, 36), 3))]  # runs that are stored; there are 4 + 12 + 24
    for count in waits:
        process = begin(tmp_path, "run", "spec.toml", "-q", temporary=temporary)
        lock = tmp_path / "small" / "results.sqlite.lock"
        assert wait_until(lambda: process.poll() is not None or (lock.exists() and runs_in(tmp_path) >= count))  # noqa: B023
        time.sleep(draw.random())
        process.kill()
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, err) == (-signal.SIGKILL, "", "")
        assert wait_until(lambda: not running_with(temporary))
        assert lock.exists()
    before = stored(tmp_path / "small" / "results.sqlite") if runs_in(tmp_path) else {}
    code, out, err = campaign(tmp_path, "run", "spec.toml", "-q", temporary=temporary)
    assert (code, err, json.loads(out)["trials"]) == (0, "", 24)
    after = stored(tmp_path / "small" / "results.sqlite")
    assert {key: after[key] for key in before} == before
    assert after == stored(whole / "results.sqlite")
    assert running_with(temporary) == []
    assert left_in(temporary) == []
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == ["campaign.json", "golden", "results.sqlite"]
    (machine,) = (tmp_path / "small" / "golden").iterdir()
    assert sorted(path.name for path in machine.iterdir()) == [
        "ddp:2-seed1", "ddp:2-seed2", "single-seed1", "single-seed2"
    ]  # fmt: skip


def interrupt(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Ctrl-C goes to all processes in the terminal's foreground, SIGTERM to one."""
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_an_interrupted_golden_run_ends_at_once_and_leaves_nothing(
    tmp_path: Path, temporary: Path, number: signal.Signals, seconds: float
) -> None:
    """From the moment when the lock is taken; the run would go on for hours."""
    (tmp_path / "spec.toml").write_text(ENDLESS)
    process = begin(tmp_path, "run", "spec.toml", "-q", temporary=temporary)
    assert wait_until(lambda: process.poll() is not None or (tmp_path / "small" / "results.sqlite.lock").exists())
    time.sleep(seconds)
    interrupt(process, number)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err.strip()) == (128 + number, "", "")
    assert wait_until(lambda: not running_with(temporary))
    assert left_in(temporary) == []
    assert not (tmp_path / "small" / "results.sqlite.lock").exists()
    assert [path for path in (tmp_path / "small").rglob("*") if "flipper" in path.name] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_campaign_keeps_what_had_finished_and_goes_on(
    tmp_path: Path, temporary: Path, whole: Path, number: signal.Signals
) -> None:
    process = begin(tmp_path, "run", "spec.toml", temporary=temporary)
    database = tmp_path / "small" / "results.sqlite"
    assert wait_until(lambda: process.poll() is not None or number_of(database) >= 3)
    seen = stored(database)
    interrupt(process, number)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (128 + number, "")
    assert err.strip().splitlines()[-1].startswith("ended early; what had finished is kept, and the same command goes")
    assert "Traceback" not in err
    assert wait_until(lambda: not running_with(temporary))
    assert left_in(temporary) == []
    kept = stored(database)
    assert {key: kept[key] for key in seen} == seen
    assert len(kept) < len(stored(whole / "results.sqlite"))
    assert campaign(tmp_path, "run", "spec.toml", "-q", temporary=temporary)[0] == 0
    assert stored(database) == stored(whole / "results.sqlite")


def test_a_campaign_that_another_process_runs_is_left_to_it(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "spec.toml").write_text(ENDLESS)
    first = begin(tmp_path, "run", "spec.toml", "-q", temporary=temporary)
    assert wait_until(lambda: (tmp_path / "small" / "results.sqlite.lock").exists())
    assert wait_until((tmp_path / "small" / "campaign.json").exists)
    kept = (tmp_path / "small" / "campaign.json").read_bytes()
    code, out, err = campaign(
        tmp_path, "run", "spec.toml", "-q", "--set", "campaign.trials=50", "--set", "axes.bits=exponent,sign"
    )
    assert (tmp_path / "small" / "campaign.json").read_bytes() == kept
    lock = "small/results.sqlite.lock"
    who = f"process {first.pid} on {socket.gethostname()}"
    assert (code, out) == (1, "")
    assert err == f"flipper: error: {who} writes to this campaign; wait for it, or remove {lock} if it is gone\n"
    code, out, _ = campaign(tmp_path, "status", "small")
    assert (code, json.loads(out)["running"]) == (0, [who])
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=PATIENCE)


def at_start(content: bytes) -> bytes:
    return b"\xff" * 64 + content[64:]


def in_the_middle(content: bytes) -> bytes:
    page = int.from_bytes(content[16:18], "big")
    middle = len(content) // page // 2 * page
    return content[:middle] + os.urandom(page) + content[middle + page :]


def cut_off(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize("damage", [at_start, in_the_middle, cut_off])
def test_a_damaged_database_is_told_and_left_as_it_is(
    tmp_path: Path, whole: Path, damage: Callable[[bytes], bytes]
) -> None:
    shutil.copytree(whole, tmp_path / "small")
    database = tmp_path / "small" / "results.sqlite"
    content = database.read_bytes()
    damaged = damage(content)
    database.write_bytes(damaged)
    code, out, err = campaign(tmp_path, "run", "small")
    assert (code, out) == (1, "")
    assert err.startswith("flipper: error: small/results.sqlite can't be used: ")
    assert err.endswith("; move it away to start anew, or restore a copy\n")
    assert err.count("\n") == 1
    assert database.read_bytes() == damaged
    assert not database.with_name("results.sqlite.lock").exists()
    database.write_bytes(content)
    code, out, _ = campaign(tmp_path, "run", "small", "-q")
    assert (code, json.loads(out)["trials"]) == (0, 24)


def test_a_reader_undoes_what_a_killed_writer_had_begun(tmp_path: Path, whole: Path) -> None:
    """A transaction that has spilled into the file already, with its journal beside it."""
    database = tmp_path / "results.sqlite"
    shutil.copy(whole / "results.sqlite", database)
    code = f"""
import os, signal, sqlite3
connection = sqlite3.connect({str(database)!r}, isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN")
connection.execute("UPDATE runs SET summary = summary || ' ', detail = zeroblob(20000)")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert database.with_name("results.sqlite-journal").exists()
    with Store(database) as store:
        assert len(list(store.runs("trial", detail=True))) == 24
    assert stored(database) == stored(whole / "results.sqlite")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """A file that leaves so many bytes."""
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - leave)))
    return filler


@pytest.mark.parametrize("leave", [0, 60_000])
def test_a_full_disk_ends_a_campaign_with_one_line_and_keeps_what_had_finished(
    tmp_path: Path, small_disk: Path, whole: Path, leave: int
) -> None:
    database = small_disk / "small" / "results.sqlite"
    assert campaign(small_disk, "run", "spec.toml", "-q", "--set", "campaign.trials=1")[0] == 0
    before = stored(database)
    filler = fill(small_disk, leave)
    code, out, err = campaign(small_disk, "run", "spec.toml", "-q")
    assert (code, out) == (1, "")
    assert err.startswith("flipper: error: ")
    assert "space left" in err
    assert err.count("\n") == 1
    after = stored(database)
    assert {key: after[key] for key in before} == before
    assert [path.name for path in small_disk.rglob("*.lock*")] == []
    filler.unlink()
    assert campaign(small_disk, "run", "spec.toml", "-q")[0] == 0
    assert stored(database) == stored(whole / "results.sqlite")


@pytest.mark.parametrize("leave", [40 * 1024, 72 * 1024])
def test_a_disk_without_room_for_temporary_files_is_no_outcome_of_a_trial(
    tmp_path: Path, small_disk: Path, whole: Path, leave: int
) -> None:
    """In the second case there is room for the altered checkpoint, and not for the files by which two ranks meet."""
    assert campaign(tmp_path, "run", "spec.toml", "-q", "--set", "campaign.trials=1")[0] == 0
    fill(small_disk, leave)
    code, out, err = campaign(tmp_path, "run", "spec.toml", "-q", "--workers", "2", temporary=small_disk)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "space left" in err
    expected = stored(whole / "results.sqlite")
    found = stored(tmp_path / "small" / "results.sqlite")
    assert found == {key: expected[key] for key in found}  # no crash, no refusal


@pytest.mark.slow
def test_a_database_that_another_program_has_locked_is_told(tmp_path: Path, whole: Path) -> None:
    """As a database browser does; the campaign waits for it first."""
    shutil.copytree(whole, tmp_path / "small")
    with closing(sqlite3.connect(tmp_path / "small" / "results.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        code, out, err = campaign(tmp_path, "run", "small", "-q")
    assert (code, out) == (1, "")
    assert err == "flipper: error: small/results.sqlite can't be used: database is locked; try again\n"
