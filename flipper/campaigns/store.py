"""Store: a campaign's results in SQLite, written by one process at a time."""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from flipper.campaigns import locks
from flipper.campaigns.record import RunRecord
from flipper.errors import FlipperError, OutputError, UsageError

Numbers = dict[tuple[str, int], set[int]]
"""By kind and cell (-1 where it has none), the numbers of the runs that are stored."""

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
    """The database of a campaign, for `with`. A reader sees what is committed while another process writes,
    and in an empty file no runs.

    write: take the lock of the one writer; OutputError names who has it, or says that the database is damaged, which
    is looked for before anything is added. A rollback journal, since write-ahead logs
    fail on the network filesystems where cluster folders lie.
    """

    def __init__(self, path: Path, write: bool = False) -> None:
        self.path = path
        self._lock = lock_of(path) if write else None
        if not write and not path.is_file():
            raise UsageError(f"{path.parent} has no results yet: no {path.name}")
        if self._lock is not None:
            locks.take(self._lock)
        try:
            self._database = self._connect(write)
        except BaseException:
            self._unlock()
            raise

    def add(self, *records: RunRecord) -> None:
        """Store runs, all or none; one that is there already stays as it is."""
        self.join(records, {})

    def join(self, records: Iterable[RunRecord], facts: Mapping[str, Any]) -> None:
        """Store runs and facts, all or none; a run that is there already stays as it is."""
        rows = (
            (
                r.kind, r.cell, r.trial, r.parallel, str(r.training_seed), r.checkpoint or "", r.fingerprint, r.plan,
                json.dumps(r.summary(), separators=(",", ":")), zlib.compress(json.dumps(r.detail()).encode(), 6),
            )
            for r in records
        )  # fmt: skip
        with _told(self.path), self._database as database:
            database.executemany("INSERT OR IGNORE INTO runs VALUES (?,?,?,?,?,?,?,?,?,?)", rows)
            for name, value in facts.items():
                database.execute("INSERT OR REPLACE INTO facts VALUES (?,?)", (name, json.dumps(value)))

    def set_fact(self, name: str, value: Any) -> None:
        """Keep a value of the whole campaign, such as the seconds it has run."""
        self.join((), {name: value})

    def facts(self) -> dict[str, Any]:
        """The values of the whole campaign."""
        with _told(self.path):
            return {name: json.loads(value) for name, value in self._database.execute("SELECT * FROM facts")}

    def runs(self, *kinds: str, detail: bool = False) -> Iterator[RunRecord]:
        """Stored runs of these kinds, by kind, cell and trial; without `detail` their long series are empty."""
        marks = ",".join("?" * len(kinds))
        columns = "summary, detail" if detail else "summary"
        order = "kind, cell, trial, parallel, training_seed, checkpoint, fingerprint"
        with _told(self.path):
            rows = self._database.execute(f"SELECT {columns} FROM runs WHERE kind IN ({marks}) ORDER BY {order}", kinds)
            while some := rows.fetchmany(100):
                # One document of many is read in two thirds of the time of many documents.
                for values, (_, *long) in zip(json.loads(f"[{','.join(row[0] for row in some)}]"), some, strict=True):
                    if long:
                        values.update(json.loads(zlib.decompress(long[0])))
                    yield RunRecord.stored(values)

    def finished(self) -> dict[int, set[int]]:
        """The numbers of the trials that each cell has results of."""
        found: dict[int, set[int]] = {}
        with _told(self.path):
            for cell, trial in self._database.execute("SELECT cell, trial FROM runs WHERE kind = 'trial'"):
                found.setdefault(cell, set()).add(trial)
        return found

    def of_plan(self, plan: str) -> RunRecord | None:
        """A trial with this plan, which has a result of its own."""
        with _told(self.path):
            for summary, long in self._database.execute(
                "SELECT summary, detail FROM runs WHERE plan = ? AND plan != '' AND kind = 'trial'", (plan,)
            ):
                record = RunRecord.stored({**json.loads(summary), **json.loads(zlib.decompress(long))})
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
        with _told(self.path):
            # A reader may have to roll back what a killed writer has begun, so it opens for writing where it may.
            mode = "rwc" if write else "rw" if os.access(self.path, os.W_OK) else "ro"
            where = f"file:{_quoted(self.path)}?mode={mode}"
            database = sqlite3.connect(where, uri=True, timeout=30, check_same_thread=False)
            try:
                if not write and _version(database) == 0:  # its writer was killed at once, or is about to begin
                    database.close()
                    database = sqlite3.connect(":memory:", check_same_thread=False)
                    _bring_up_to_date(database)
                self._prepare(database, write)
            except BaseException:
                database.close()
                raise
            return database

    def _prepare(self, database: sqlite3.Connection, write: bool) -> None:
        """Check the database and bring its tables up to date; a reader is kept from changing it."""
        version = _version(database)
        if version > len(MIGRATIONS):
            raise UsageError(f"{self.path} was written by a newer flipper (version {version} of its tables)")
        if not write:
            if version < len(MIGRATIONS):
                raise UsageError(f"{self.path} is of an older flipper; `campaign run` brings it up to date")
            database.execute("PRAGMA query_only = ON")
            return
        (problem,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            raise sqlite3.DatabaseError(str(problem).splitlines()[-1])
        database.execute("PRAGMA journal_mode = DELETE")
        _bring_up_to_date(database)

    def _unlock(self) -> None:
        if self._lock is not None:
            locks.release(self._lock)


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def _bring_up_to_date(database: sqlite3.Connection) -> None:
    version = _version(database)
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        database.executescript(f"BEGIN; {script}; PRAGMA user_version = {number}; COMMIT;")


def lock_of(path: Path) -> Path:
    """The lock of a database's one writer."""
    return path.with_name(f"{path.name}.lock")


def numbers_there(path: Path) -> Numbers:
    """The runs that a database has, of whatever version; none where there is no database yet."""
    found: Numbers = {}
    if path.is_file():
        with _told(path), closing(sqlite3.connect(f"file:{_quoted(path)}?mode=rw", uri=True, timeout=30)) as database:
            if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'runs'").fetchone():
                for kind, cell, number in database.execute("SELECT DISTINCT kind, cell, trial FROM runs"):
                    found.setdefault((kind, cell), set()).add(number)
    return found


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Errors of a database as flipper's own."""
    try:
        yield
    except FlipperError:
        raise
    except (sqlite3.DatabaseError, ValueError, TypeError, zlib.error) as error:
        if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
            raise OutputError(f"{path}: no space left on the device; finished trials are kept") from error
        hint = "move it away to start anew, or restore a copy" if _damaged(error) else "try again"
        raise OutputError(f"{path} can't be used: {error}; {hint}") from error


def _damaged(error: Exception) -> bool:
    return not isinstance(error, sqlite3.OperationalError)


def _quoted(path: Path) -> str:
    from urllib.parse import quote

    return quote(str(path.resolve()))

