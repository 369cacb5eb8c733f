"""Results are stored once, by one writer, and survive; readers see what is committed."""

import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from flipper.campaigns.record import RunRecord
from flipper.campaigns.store import Store, numbers_there
from flipper.errors import OutputError, UsageError


def trial(cell: int = 0, number: int = 0, **values: object) -> RunRecord:
    return RunRecord("trial", "ddp:2", 1, cell=cell, trial=number, fingerprint="f", **values)  # type: ignore[arg-type]


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    record = trial(
        2, 5, seed=2**64 - 1, steps=[[3, 0.5, 1.0]], evals=[[4, math.inf, 0.9]], loss=math.nan, reused=[1, 2],
        faults=[["a.weight", 7, [30], 0.5, "Infinity"]],
    )  # fmt: skip
    with Store(tmp_path / "r.sqlite", write=True) as store:
        store.add(record)
    with Store(tmp_path / "r.sqlite") as store:
        (whole,) = store.runs("trial", detail=True)
        (light,) = store.runs("trial")
    assert math.isnan(whole.loss or 0)
    whole.loss = record.loss = None
    assert whole == record
    assert (light.seed, light.steps, light.faults, light.evals) == (2**64 - 1, [], [], record.evals)


def test_a_result_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    with Store(tmp_path / "r.sqlite", write=True) as store:
        store.add(trial(metric=0.5))
        store.add(trial(metric=0.9), trial(0, 1))
        assert [run.metric for run in store.runs("trial")] == [0.5, None]
        assert store.finished() == {0: {0, 1}}


def test_a_plan_is_found_by_its_first_result_and_not_by_a_reused_one(tmp_path: Path) -> None:
    with Store(tmp_path / "r.sqlite", write=True) as store:
        store.add(trial(0, 1, plan="p", reused=(0, 0)), trial(1, 1, plan="p", metric=0.4), trial(2, 2))
        assert (found := store.of_plan("p")) is not None
        assert (found.cell, found.metric) == (1, 0.4)
        assert store.of_plan("q") is None
        assert store.of_plan("") is None


def test_facts_are_kept(tmp_path: Path) -> None:
    with Store(tmp_path / "r.sqlite", write=True) as store:
        store.set_fact("seconds", 1.5)
        store.set_fact("seconds", 2.5)
        assert store.facts() == {"seconds": 2.5}


def test_the_journal_is_no_write_ahead_log(tmp_path: Path) -> None:
    with Store(tmp_path / "r.sqlite", write=True) as store:
        store.add(trial())
        assert sqlite3.connect(tmp_path / "r.sqlite").execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_reader_sees_what_is_committed_while_another_process_writes(tmp_path: Path) -> None:
    with Store(tmp_path / "r.sqlite", write=True) as store:
        store.add(trial())
        code = (
            "from pathlib import Path; from flipper.campaigns.store import Store; "
            f"print(len(list(Store(Path({str(tmp_path / 'r.sqlite')!r})).runs('trial'))))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_second_writer_is_told_who_writes(tmp_path: Path) -> None:
    who = f"process {os.getpid()} on {socket.gethostname()}"
    with Store(tmp_path / "r.sqlite", write=True), pytest.raises(OutputError, match=who):
        Store(tmp_path / "r.sqlite", write=True)
    Store(tmp_path / "r.sqlite", write=True).close()
    assert not (tmp_path / "r.sqlite.lock").exists()


def test_a_lock_of_a_process_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    lock = {"host": socket.gethostname(), "process": int(gone.stdout), "started": "1"}
    (tmp_path / "r.sqlite.lock").write_text(json.dumps(lock), "utf-8")
    with Store(tmp_path / "r.sqlite", write=True) as store:
        store.add(trial())
        assert json.loads((tmp_path / "r.sqlite.lock").read_text("utf-8"))["process"] == os.getpid()


def test_a_lock_of_another_host_is_respected(tmp_path: Path) -> None:
    lock = {"host": "elsewhere", "process": 1, "started": "1"}
    (tmp_path / "r.sqlite.lock").write_text(json.dumps(lock), "utf-8")
    with pytest.raises(OutputError, match=r"process 1 on elsewhere .*r\.sqlite\.lock"):
        Store(tmp_path / "r.sqlite", write=True)


def test_a_database_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "r.sqlite").write_bytes(b"no database at all, only text " * 100)
    with pytest.raises(OutputError, match="can't be used"):
        list(Store(tmp_path / "r.sqlite").runs("trial"))
    assert not (tmp_path / "r.sqlite.lock").exists()


def test_a_database_that_cannot_be_opened_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of another user, which root can open all the same."""

    def connect(*_: object, **__: object) -> NoReturn:
        raise sqlite3.OperationalError("unable to open database file")

    (tmp_path / "r.sqlite").touch()
    monkeypatch.setattr(sqlite3, "connect", connect)
    for opened in (numbers_there, Store):
        with pytest.raises(OutputError, match=r"r\.sqlite can't be used: unable to open database file; try again"):
            opened(tmp_path / "r.sqlite")


def test_results_of_a_newer_flipper_are_refused(tmp_path: Path) -> None:
    Store(tmp_path / "r.sqlite", write=True).close()
    with sqlite3.connect(tmp_path / "r.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(UsageError, match="newer flipper"):
        Store(tmp_path / "r.sqlite")


def test_an_empty_file_has_no_runs_and_stays_empty(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    path.touch()
    with Store(path) as store:
        assert list(store.runs("trial", detail=True)) == []
        assert (store.facts(), store.finished(), store.of_plan("p")) == ({}, {}, None)
    assert path.read_bytes() == b""
    with Store(path, write=True) as store:
        store.add(trial())
        assert store.finished() == {0: {0}}


def test_reading_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no results yet"):
        Store(tmp_path / "r.sqlite")
    assert not list(tmp_path.iterdir())
