"""Store: a campaign's results in SQLite, written by one process at a time."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from flipper.campaigns.record import RunRecord
from flipper.errors import FlipperError, OutputError, UsageError

MIGRATIONS: Final = (
    """
    CREATE TABLE runs (
        kind TEXT NOT NULL, cell INTEGER NOT NULL, trial INTEGER NOT NULL, parallel TEXT NOT NULL,
        training_seed TEXT NOT NULL, checkpoint TEXT NOT NULL, fingerprint TEXT NOT NULL, plan TEXT NOT NULL,
        summary TEXT NOT NULL, detail BLOB NOT NULL,
        PRIMARY KEY (kind, cell, trial, parallel, training_seed, checkpoint, fingerprint)
    );
    CREATE INDEX by_plan ON runs (plan) WHERE plan != '';
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    """,
)
"""What brings an older database up to date, in order; how many were done stands in its user_version."""


class Store:
    """The database of a campaign, for `with`. A reader sees what is committed while another process writes.

    write: take the lock of the one writer; OutputError names who has it. A rollback journal, since write-ahead logs
    fail on the network filesystems where cluster folders lie.
    """

    def __init__(self, path: Path, write: bool = False) -> None:
        self.path = path
        self._lock = path.with_name(f"{path.name}.lock") if write else None
        if not write and not path.is_file():
            raise UsageError(f"{path.parent} has no results yet: no {path.name}")
        if self._lock is not None:
            _take(self._lock)
        try:
            self._database = self._connect(write)
        except BaseException:
            self._unlock()
            raise

    def add(self, *records: RunRecord) -> None:
        """Store runs, all or none; one that is there already stays as it is."""
        rows = [
            (
                r.kind, r.cell, r.trial, r.parallel, str(r.training_seed), r.checkpoint or "", r.fingerprint, r.plan,
                json.dumps(r.summary(), separators=(",", ":")), zlib.compress(json.dumps(r.detail()).encode(), 6),
            )
            for r in records
        ]  # fmt: skip
        with self._told(), self._database as database:
            database.executemany("INSERT OR IGNORE INTO runs VALUES (?,?,?,?,?,?,?,?,?,?)", rows)

    def set_fact(self, name: str, value: Any) -> None:
        """Keep a value of the whole campaign, such as the seconds it has run."""
        with self._told(), self._database as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?,?)", (name, json.dumps(value)))

    def facts(self) -> dict[str, Any]:
        """The values of the whole campaign."""
        with self._told():
            return {name: json.loads(value) for name, value in self._database.execute("SELECT * FROM facts")}

    def runs(self, *kinds: str, detail: bool = False) -> Iterator[RunRecord]:
        """Stored runs of these kinds, by kind, cell and trial; without `detail` their long series are empty."""
        marks = ",".join("?" * len(kinds))
        columns = "summary, detail" if detail else "summary"
        order = "kind, cell, trial, parallel, training_seed, checkpoint, fingerprint"
        with self._told():
            for summary, *long in self._database.execute(
                f"SELECT {columns} FROM runs WHERE kind IN ({marks}) ORDER BY {order}", kinds
            ):
                values = json.loads(summary)
                if long:
                    values.update(json.loads(zlib.decompress(long[0])))
                yield RunRecord(**values)

    def finished(self) -> dict[int, set[int]]:
        """The numbers of the trials that each cell has results of."""
        found: dict[int, set[int]] = {}
        with self._told():
            for cell, trial in self._database.execute("SELECT cell, trial FROM runs WHERE kind = 'trial'"):
                found.setdefault(cell, set()).add(trial)
        return found

    def of_plan(self, plan: str) -> RunRecord | None:
        """A trial with this plan, which has a result of its own."""
        with self._told():
            for summary, long in self._database.execute(
                "SELECT summary, detail FROM runs WHERE plan = ? AND plan != '' AND kind = 'trial'", (plan,)
            ):
                record = RunRecord(**json.loads(summary), **json.loads(zlib.decompress(long)))
                if record.reused is None:
                    return record
        return None

    def close(self) -> None:
        """Let go of the database and of the lock."""
        self._database.close()
        self._unlock()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, write: bool) -> sqlite3.Connection:
        with self._told():
            where = f"file:{_quoted(self.path)}" + ("" if write else "?mode=ro")
            database = sqlite3.connect(where, uri=True, timeout=30, check_same_thread=False)
            version = int(database.execute("PRAGMA user_version").fetchone()[0])
            if version > len(MIGRATIONS):
                raise UsageError(f"{self.path} was written by a newer flipper (version {version} of its tables)")
            if write:
                database.execute("PRAGMA journal_mode = DELETE")
                for number, script in enumerate(MIGRATIONS[version:], version + 1):
                    database.executescript(f"BEGIN; {script}; PRAGMA user_version = {number}; COMMIT;")
            elif version < len(MIGRATIONS):
                raise UsageError(f"{self.path} is of an older flipper; `campaign run` brings it up to date")
            return database

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the database as flipper's own."""
        try:
            yield
        except FlipperError:
            raise
        except (sqlite3.DatabaseError, ValueError, TypeError, zlib.error) as error:
            if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
                raise OutputError(f"{self.path}: no space left on the device; finished trials are kept") from error
            hint = "move it away to start anew, or restore a copy" if _damaged(error) else "try again"
            raise OutputError(f"{self.path} can't be used: {error}; {hint}") from error

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.unlink(missing_ok=True)


def _damaged(error: Exception) -> bool:
    return not isinstance(error, sqlite3.OperationalError)


def _quoted(path: Path) -> str:
    from urllib.parse import quote

    return quote(str(path.resolve()))


def _take(lock: Path) -> None:
    """Make the lock file, naming this host and process; take over that of a process of this host that is gone."""
    mine = {"host": socket.gethostname(), "process": os.getpid(), "started": _started(os.getpid())}
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            try:
                with lock.open("x", encoding="utf-8") as file:
                    json.dump(mine, file)
                return
            except FileExistsError:
                holder = _holder(lock)
                alive = holder.get("host") != mine["host"] or (
                    _started(holder.get("process")) == holder.get("started") is not None
                )
                if alive:
                    who = f"process {holder.get('process')} on {holder.get('host')}"
                    raise OutputError(
                        f"{who} writes to this campaign; wait for it, or remove {lock} if it is gone"
                    ) from None
                lock.unlink(missing_ok=True)
        raise OutputError(f"{lock} appears again and again; another process writes to this campaign")
    except FlipperError:
        raise
    except OSError as error:
        raise OutputError(f"can't write {lock}: {error.strerror or error}") from error


def _holder(lock: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        holder = json.loads(lock.read_text("utf-8"))
        if isinstance(holder, dict):
            return holder
    return {"host": socket.gethostname(), "process": None, "started": None}


def _started(process: int | None) -> str | None:
    """When a process of this machine began, in clock ticks since it booted; None when there is none."""
    if process is None:
        return None
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        with suppress(OSError):
            os.kill(process, 0)  # where there is no /proc
            return "running"
        return None
