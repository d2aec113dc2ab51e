# SPDX-License-Identifier: Apache-2.0
"""Keeps runs, attestations, windows, verdicts and actions in one SQLite file that survives a kill at any moment.

Write-ahead log; what decides something (windows with their verdicts, actions) is on disk before the call
returns, attestations are at the next checkpoint. Rows are JSON under a few columns to look for.

A disk that is full or fails does not stop the daemon: what it refuses waits in memory, in order (`degraded` says so), and
is written when there is room again. What is then given up, or dies with the daemon, was never acknowledged as kept.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.rules import Rule
from isoexec.contracts.verdict import Verdict
from isoexec.contracts.window import Window
from isoexec.daemon.accounts import LaneRow
from isoexec.daemon.backlog import Backlog, Entry
from isoexec.daemon.retention import move_batch, next_archive

__all__ = ["Journal", "JournalError"]

_FORMAT = 1
BACKLOG_BYTES = 64 << 20
"""What waits in memory for a disk that refuses it, at most."""
_DRAIN_BYTES = 2 << 20
_TABLES = ("runs", "attestations", "windows", "verdicts", "actions", "steps")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, started REAL NOT NULL, ended REAL, regime TEXT NOT NULL,
    monitor_only INTEGER NOT NULL, policy TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS processes (
    session INTEGER NOT NULL, source TEXT NOT NULL, time REAL NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (session, source));
CREATE TABLE IF NOT EXISTS attestations (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, source TEXT NOT NULL, time REAL NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS windows (
    id INTEGER PRIMARY KEY, session INTEGER NOT NULL, run TEXT NOT NULL, step INTEGER NOT NULL,
    time REAL NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS verdicts (
    id INTEGER PRIMARY KEY, window INTEGER NOT NULL, run TEXT NOT NULL, step INTEGER NOT NULL,
    rule TEXT NOT NULL, outcome TEXT NOT NULL, action TEXT NOT NULL, time REAL NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS actions (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, step INTEGER NOT NULL, action TEXT NOT NULL,
    time REAL NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS lanes (lane TEXT PRIMARY KEY, run TEXT NOT NULL, taken TEXT NOT NULL, time REAL NOT NULL);
CREATE TABLE IF NOT EXISTS used (name TEXT PRIMARY KEY, id INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS windows_by_run ON windows (run, id);
CREATE INDEX IF NOT EXISTS verdicts_by_run ON verdicts (run, id);
CREATE INDEX IF NOT EXISTS steps_by_run ON steps (run, id);
CREATE INDEX IF NOT EXISTS verdicts_by_window ON verdicts (window);
CREATE INDEX IF NOT EXISTS windows_by_session ON windows (session, id);
"""


class JournalError(IsoExecError):
    """A journal that is not there, or is not one of this format."""


class Journal:
    """One writer, and readers in other processes. Not for use from several threads at once."""

    def __init__(self, database: sqlite3.Connection, path: Path | None = None) -> None:
        self._database = database
        self._path = path
        self._left_out = 0
        self._backlog = Backlog(BACKLOG_BYTES)
        self._ids: dict[str, int] = {}
        self.errors = 0
        """Writes that the disk refused."""
        self.last_error = ""

    @classmethod
    def create(cls, path: Path) -> Journal:
        """Open for writing, making the file (0600) where there is none."""
        path.touch(mode=0o600, exist_ok=True)
        # a reader may hold the file for a moment; autocommit, so that each transaction below is explicit
        try:
            database = sqlite3.connect(path, timeout=10.0, isolation_level=None)
        except sqlite3.Error as error:
            raise JournalError(f"{path}: cannot be opened: {error}") from error
        try:
            found = database.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, _FORMAT):
                raise JournalError(
                    f"{path}: wanted journal format {_FORMAT}, found {found}; move the file away"
                )
            database.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a new file only
            database.execute("PRAGMA temp_store=MEMORY")
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA journal_size_limit=67108864")
            database.executescript(_SCHEMA)
            if found == 0:
                database.execute(f"PRAGMA user_version={_FORMAT}")
            journal = cls(database, path)
            used = dict(database.execute("SELECT name, id FROM used"))
            for table in _TABLES:
                most = database.execute(f"SELECT max(id) FROM {table}").fetchone()[0] or 0  # noqa: S608
                journal._ids[table] = max(int(most), used.get(table, 0))
        except sqlite3.Error as error:
            database.close()
            raise JournalError(
                f"{path}: cannot be opened as a journal: {error}; free some disk, or move the file away"
            ) from error
        except JournalError:
            database.close()
            raise
        return journal

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Open for reading only. Raises JournalError when there is no journal of this format."""
        if not path.is_file():
            raise JournalError(f"{path}: there is no journal")
        try:
            database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0)
            found = database.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.Error as error:
            raise JournalError(f"{path}: cannot be read as a journal: {error}") from error
        if found != _FORMAT:
            database.close()
            raise JournalError(f"{path}: wanted journal format {_FORMAT}, found {found}")
        return cls(database)

    def close(self) -> None:
        self._database.close()

    @property
    def degraded(self) -> bool:
        """Whether rows wait in memory for a disk that refuses them."""
        return len(self._backlog) > 0

    @property
    def waiting(self) -> int:
        """Rows that wait."""
        return len(self._backlog)

    @property
    def lost(self) -> int:
        """Rows that were given up because too many waited."""
        return self._backlog.lost + self._left_out

    def leave_out(self) -> None:
        """Count a row that is not written, because its process sends more of them than is kept."""
        self._left_out += 1

    def size(self) -> int:
        """Bytes of the journal that hold something, without its write-ahead log."""
        pages, free, each = (
            self._database.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * each)

    def drain(self) -> bool:
        """Try to write what waits, a bounded part of it; whether nothing waits any more."""
        if not self._backlog:
            return True
        entries = self._backlog.first(_DRAIN_BYTES)
        try:
            self._commit(entries, durable=True)
        except sqlite3.Error as error:
            self._refused(error)
            return False
        self._backlog.drop(entries)
        return not self._backlog

    def retire(self, *, before: float, archive_bytes: int, keep_archives: int, most: int = 500) -> int:
        """Move up to `most` rows of each kind, older than `before` (unix seconds), to an archive; give how many went.

        The last windows of each run and the last attestation of each process stay. What cannot be archived stays, and
        0 is returned.
        """
        if self._path is None or self._backlog:
            return 0
        try:
            marks = [(_MARK, (name, key)) for name, key in self._ids.items()]
            self._commit([Entry(rows=tuple(marks), decides=False)], durable=False)
            archive = next_archive(self._path, archive_bytes, keep_archives)
            moved = move_batch(self._database, archive, _SCHEMA, _FORMAT, before=before, most=most)
            if moved:
                self._database.execute("PRAGMA incremental_vacuum(2000)").fetchall()
        except (sqlite3.Error, OSError) as error:
            self._refused(error)
            return 0
        return moved

    def _refused(self, error: Exception) -> None:
        self.errors += 1
        self.last_error = str(error)

    def _next(self, table: str) -> int:
        self._ids[table] = self._ids.get(table, 0) + 1
        return self._ids[table]

    def _keep(self, *rows: tuple[str, tuple[Any, ...]], durable: bool) -> None:
        entry = Entry(rows=rows, decides=durable)
        if self._backlog and not self.drain():
            self._backlog.add(entry)
            return
        try:
            self._commit([entry], durable=durable)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.ProgrammingError | sqlite3.IntegrityError | sqlite3.DataError):
                raise
            self._refused(error)
            self._backlog.add(entry)

    def _commit(self, entries: Sequence[Entry], *, durable: bool) -> None:
        database = self._database
        database.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        database.execute("BEGIN IMMEDIATE")
        try:
            for entry in entries:
                for statement, values in entry.rows:
                    database.execute(statement, values)
            database.execute("COMMIT")
        except BaseException:
            # SQLite has rolled back by itself after some errors of the disk
            if database.in_transaction:
                with suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
            raise

    def start_run(
        self, run: str, *, regime: str, monitor_only: bool, policy: str, data: Mapping[str, Any]
    ) -> int:
        """Begin a session of a run and give its id."""
        key = self._next("runs")
        values = (key, run, time.time(), None, regime, int(monitor_only), policy, _dump(data))
        self._keep((_insert("runs", 8), values), durable=True)
        return key

    def end_run(self, session: int) -> None:
        self._keep(("UPDATE runs SET ended = ? WHERE id = ?", (time.time(), session)), durable=True)

    def open_session(self, run: str) -> tuple[int, float] | None:
        """Give (id, unix time of the last window or of the start) of the run's last session if it never ended."""
        row = self._database.execute(
            "SELECT id, started, ended, (SELECT max(time) FROM windows WHERE session = runs.id) FROM runs "
            "WHERE run = ? ORDER BY id DESC LIMIT 1",
            (run,),
        ).fetchone()
        if row is None or row[2] is not None:
            return None
        return int(row[0]), float(row[3] or row[1])

    def add_process(self, session: int, source: str, data: Mapping[str, Any]) -> None:
        self._keep((_insert("processes", 4), (session, source, time.time(), _dump(data))), durable=False)

    def processes(self, session: int) -> dict[str, dict[str, Any]]:
        """Give the sources that were let into a session, by name."""
        rows = self._database.execute("SELECT source, data FROM processes WHERE session = ?", (session,))
        return {row[0]: json.loads(row[1]) for row in rows}

    def add_attestation(self, run: str, source: str, data: Mapping[str, Any]) -> None:
        values = (self._next("attestations"), run, source, time.time(), _dump(data))
        self._keep((_insert("attestations", 5), values), durable=False)

    def add_step(self, run: str, step: int, data: Mapping[str, Any]) -> None:
        values = (self._next("steps"), run, step, time.time(), _dump(data))
        self._keep((_insert("steps", 5), values), durable=False)

    def add_window(
        self, session: int, window: Window, verdicts: Sequence[Verdict], lanes: Sequence[LaneRow] = ()
    ) -> int:
        """Keep a window, what was said of it, and which frames it accounts for, together or not at all.

        On disk when this returns, unless `degraded`.
        """
        now = time.time()
        key = self._next("windows")
        mine = (key, session, window.run, window.step, now, _dump(window.to_dict()))
        said = [
            (
                self._next("verdicts"),
                key,
                window.run,
                v.step,
                v.rule,
                v.outcome,
                v.action,
                now,
                _dump(v.to_dict()),
            )
            for v in verdicts
        ]
        rows = [(_insert("windows", 6), mine), *((_insert("verdicts", 9), values) for values in said)]
        self._keep(*rows, *((_insert("lanes", 4), row) for row in lanes), durable=True)
        return key

    def add_lanes(self, lanes: Sequence[LaneRow]) -> None:
        """Keep which frames were accounted for; on disk when this returns, unless `degraded`."""
        if lanes:
            self._keep(*((_insert("lanes", 4), row) for row in lanes), durable=True)

    def lane(self, key: str) -> str:
        """Give the numbers of a lane's frames that were accounted for, as `isoexec.daemon.accounts.Spans` writes them."""
        row = self._database.execute("SELECT taken FROM lanes WHERE lane = ?", (key,)).fetchone()
        return str(row[0]) if row else ""

    def forget_lanes(self, *, before: float) -> None:
        """Let go of lanes that nothing was heard of since `before` (unix seconds)."""
        self._keep(("DELETE FROM lanes WHERE time < ?", (before,)), durable=False)

    def add_action(self, run: str, step: int, action: str, data: Mapping[str, Any]) -> None:
        """Keep what was done; on disk when this returns, unless `degraded`."""
        values = (self._next("actions"), run, step, action, time.time(), _dump(data))
        self._keep((_insert("actions", 6), values), durable=True)

    def runs(self, run: str | None = None) -> list[dict[str, Any]]:
        """Give the last session of every run, newest first; with a name every session of that run."""
        rows = self._database.execute(
            "SELECT run, started, ended, regime, monitor_only, policy, data, id FROM runs "
            "WHERE run = ?1 OR (?1 IS NULL AND id IN (SELECT max(id) FROM runs GROUP BY run)) ORDER BY id DESC",
            (run,),
        )
        return [
            {
                "run": row[0],
                "started": row[1],
                "ended": row[2],
                "regime": row[3],
                "monitor_only": bool(row[4]),
                "policy": row[5],
                "session": row[7],
                **json.loads(row[6]),
            }
            for row in rows
        ]

    def rules(self, session: int) -> tuple[Rule, ...]:
        """Give the rules that a session was judged by."""
        row = self._database.execute("SELECT data FROM runs WHERE id = ?", (session,)).fetchone()
        return tuple(Rule(**rule) for rule in json.loads(row[0]).get("rules", ())) if row else ()

    def sessions(self) -> list[tuple[int, str]]:
        """Give (session, run) of everything that was ever watched, oldest first."""
        return [(int(a), str(b)) for a, b in self._database.execute("SELECT id, run FROM runs ORDER BY id")]

    def windows(self, run: str, *, limit: int = 200, session: int | None = None) -> list[dict[str, Any]]:
        """Give the last windows of a run, oldest first, each with its `id`, `session` and `time`."""
        rows = self._database.execute(
            "SELECT id, session, time, data FROM windows WHERE run = ? AND (? IS NULL OR session = ?) "
            "ORDER BY id DESC LIMIT ?",
            (run, session, session, limit),
        ).fetchall()
        return [
            {"id": row[0], "session": row[1], "time": row[2], "window": json.loads(row[3])}
            for row in reversed(rows)
        ]

    def verdicts(self, run: str, *, limit: int = 500, outcome: str | None = None) -> list[dict[str, Any]]:
        """Give the last verdicts of a run, newest first."""
        rows = self._database.execute(
            "SELECT time, data FROM verdicts WHERE run = ? AND (? IS NULL OR outcome = ?) "
            "ORDER BY id DESC LIMIT ?",
            (run, outcome, outcome, limit),
        )
        return [{"time": row[0], **json.loads(row[1])} for row in rows]

    def last_verdicts(self, run: str) -> list[dict[str, Any]]:
        """Give the verdicts of the run's last window, in the order of the rules."""
        rows = self._database.execute(
            "SELECT time, data FROM verdicts WHERE window = (SELECT max(id) FROM windows WHERE run = ?) "
            "ORDER BY id",
            (run,),
        )
        return [{"time": row[0], **json.loads(row[1])} for row in rows]

    def window(self, run: str, *, step: int | None = None) -> dict[str, Any] | None:
        """Give the last window of a step, or the last with a violation, with its `verdicts`; None where there is none."""
        row = self._database.execute(
            "SELECT id, session, time, data FROM windows WHERE run = ?1 AND (step = ?2 OR (?2 IS NULL AND id IN "
            "(SELECT window FROM verdicts WHERE run = ?1 AND outcome = 'violation'))) ORDER BY id DESC LIMIT 1",
            (run, step),
        ).fetchone()
        if row is None:
            return None
        rows = self._database.execute("SELECT data FROM verdicts WHERE window = ? ORDER BY id", (row[0],))
        return {
            "id": int(row[0]),
            "session": int(row[1]),
            "time": float(row[2]),
            "window": json.loads(row[3]),
            "verdicts": [json.loads(one[0]) for one in rows],
        }

    def last_attestations(self, run: str, *, before: float) -> list[dict[str, Any]]:
        """Give the last attestation of each process of a run up to a time (unix seconds)."""
        rows = self._database.execute(
            "SELECT time, source, data FROM attestations WHERE id IN (SELECT max(id) FROM attestations "
            "WHERE run = ? AND time <= ? GROUP BY source) ORDER BY source",
            (run, before),
        )
        return [{"time": r[0], "source": r[1], **json.loads(r[2])} for r in rows]

    def actions(self, run: str, *, limit: int = 100) -> list[dict[str, Any]]:
        rows = self._database.execute(
            "SELECT time, step, action, data FROM actions WHERE run = ? ORDER BY id DESC LIMIT ?",
            (run, limit),
        )
        return [{"time": r[0], "step": r[1], "action": r[2], **json.loads(r[3])} for r in rows]

    def attestations(self, run: str, *, limit: int = 100) -> list[dict[str, Any]]:
        """Give the last attestations of a run, newest first."""
        rows = self._database.execute(
            "SELECT time, source, data FROM attestations WHERE run = ? ORDER BY id DESC LIMIT ?", (run, limit)
        )
        return [{"time": r[0], "source": r[1], **json.loads(r[2])} for r in rows]

    def steps(self, run: str, *, limit: int = 500) -> list[dict[str, Any]]:
        """Give the times and values of the last steps of a run, oldest first."""
        rows = self._database.execute(
            "SELECT time, step, data FROM steps WHERE run = ? ORDER BY id DESC LIMIT ?", (run, limit)
        ).fetchall()
        return [{"time": r[0], "step": r[1], **json.loads(r[2])} for r in reversed(rows)]


_MARK = "INSERT OR REPLACE INTO used (name, id) VALUES (?, ?)"


def _insert(table: str, columns: int) -> str:
    # over a row of the same id: a commit that failed late may have happened, and is then written again as it was
    return f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * columns)})"  # noqa: S608


def _dump(data: Mapping[str, Any]) -> str:
    # default=str: evidence may hold a value of any adapter; NaN is refused so that every reader can read it
    return json.dumps(data, sort_keys=True, allow_nan=False, default=str)
