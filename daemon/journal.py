# SPDX-License-Identifier: Apache-2.0
"""Keeps runs, attestations, windows, verdicts and actions in one SQLite file that survives a kill at any moment.

Write-ahead log; what decides something (windows with their verdicts, actions) is on disk before the call
returns, attestations are at the next checkpoint. Rows are JSON under a few columns to look for.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.rules import Rule
from isoexec.contracts.verdict import Verdict
from isoexec.contracts.window import Window

__all__ = ["Journal", "JournalError"]

_FORMAT = 1
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
CREATE INDEX IF NOT EXISTS windows_by_run ON windows (run, id);
CREATE INDEX IF NOT EXISTS verdicts_by_run ON verdicts (run, id);
CREATE INDEX IF NOT EXISTS steps_by_run ON steps (run, id);
"""


class JournalError(IsoExecError):
    """A journal that is not there, or is not one of this format."""


class Journal:
    """One writer, and readers in other processes. Not for use from several threads at once."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    @classmethod
    def create(cls, path: Path) -> Journal:
        """Open for writing, making the file (0600) where there is none."""
        path.touch(mode=0o600, exist_ok=True)
        # a reader may hold the file for a moment; autocommit, so that each transaction below is explicit
        database = sqlite3.connect(path, timeout=10.0, isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        found = database.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, _FORMAT):
            database.close()
            raise JournalError(f"{path}: wanted journal format {_FORMAT}, found {found}; move the file away")
        database.executescript(_SCHEMA)
        database.execute(f"PRAGMA user_version={_FORMAT}")
        return cls(database)

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

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        database = self._database
        database.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
        except BaseException:
            database.execute("ROLLBACK")
            raise
        database.execute("COMMIT")

    def start_run(
        self, run: str, *, regime: str, monitor_only: bool, policy: str, data: Mapping[str, Any]
    ) -> int:
        """Begin a session of a run and give its id."""
        with self._transaction(durable=True) as database:
            row = database.execute(
                "INSERT INTO runs (run, started, regime, monitor_only, policy, data) VALUES (?, ?, ?, ?, ?, ?)",
                (run, time.time(), regime, int(monitor_only), policy, _dump(data)),
            )
            return int(row.lastrowid or 0)

    def end_run(self, session: int) -> None:
        with self._transaction(durable=True) as database:
            database.execute("UPDATE runs SET ended = ? WHERE id = ?", (time.time(), session))

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
        with self._transaction(durable=False) as database:
            database.execute(
                "INSERT OR REPLACE INTO processes (session, source, time, data) VALUES (?, ?, ?, ?)",
                (session, source, time.time(), _dump(data)),
            )

    def processes(self, session: int) -> dict[str, dict[str, Any]]:
        """Give the sources that were let into a session, by name."""
        rows = self._database.execute("SELECT source, data FROM processes WHERE session = ?", (session,))
        return {row[0]: json.loads(row[1]) for row in rows}

    def add_attestation(self, run: str, source: str, data: Mapping[str, Any]) -> None:
        with self._transaction(durable=False) as database:
            database.execute(
                "INSERT INTO attestations (run, source, time, data) VALUES (?, ?, ?, ?)",
                (run, source, time.time(), _dump(data)),
            )

    def add_step(self, run: str, step: int, data: Mapping[str, Any]) -> None:
        with self._transaction(durable=False) as database:
            database.execute(
                "INSERT INTO steps (run, step, time, data) VALUES (?, ?, ?, ?)",
                (run, step, time.time(), _dump(data)),
            )

    def add_window(self, session: int, window: Window, verdicts: Sequence[Verdict]) -> int:
        """Keep a window and what was said of it, together or not at all; on disk when this returns."""
        now = time.time()
        with self._transaction(durable=True) as database:
            row = database.execute(
                "INSERT INTO windows (session, run, step, time, data) VALUES (?, ?, ?, ?, ?)",
                (session, window.run, window.step, now, _dump(window.to_dict())),
            )
            key = int(row.lastrowid or 0)
            database.executemany(
                "INSERT INTO verdicts (window, run, step, rule, outcome, action, time, data) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (key, window.run, v.step, v.rule, v.outcome, v.action, now, _dump(v.to_dict()))
                    for v in verdicts
                ],
            )
        return key

    def add_action(self, run: str, step: int, action: str, data: Mapping[str, Any]) -> None:
        """Keep what was done; on disk when this returns."""
        with self._transaction(durable=True) as database:
            database.execute(
                "INSERT INTO actions (run, step, action, time, data) VALUES (?, ?, ?, ?, ?)",
                (run, step, action, time.time(), _dump(data)),
            )

    def runs(self) -> list[dict[str, Any]]:
        """Give the last session of every run, newest first."""
        rows = self._database.execute(
            "SELECT run, started, ended, regime, monitor_only, policy, data, id FROM runs "
            "WHERE id IN (SELECT max(id) FROM runs GROUP BY run) ORDER BY id DESC"
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


def _dump(data: Mapping[str, Any]) -> str:
    # default=str: evidence may hold a value of any adapter; NaN is refused so that every reader can read it
    return json.dumps(data, sort_keys=True, allow_nan=False, default=str)
