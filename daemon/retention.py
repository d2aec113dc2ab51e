# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: S608 - every name in a statement is of this file
"""Moves old rows of a journal into archives beside it, a bounded batch at a time, and removes the oldest archives.

A row is in the archive, on disk, before it leaves the journal: a kill between the two leaves it in both, and the next
batch writes it over itself. The live file is never renamed, so readers in other processes keep reading.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

__all__ = ["archives", "move_batch", "next_archive"]

_NAME = re.compile(r"journal-archive-(\d{6})\.sqlite")

KEPT_WINDOWS = 64
"""Windows of a session that stay in the journal: what a daemon that takes up the session replays."""

_OLD: dict[str, str] = {
    # the last windows of a run stay: they say how it stands, and a new daemon goes on from them
    "windows": "time < :before AND id <= (SELECT coalesce((SELECT id FROM main.windows AS later WHERE later.run = windows.run "
    f"ORDER BY id DESC LIMIT 1 OFFSET {KEPT_WINDOWS}), -1))",
    "steps": "time < :before",
    "actions": "time < :before",
    # what every process attested last stays
    "attestations": "time < :before AND id NOT IN (SELECT max(id) FROM main.attestations GROUP BY run, source)",
}


def archives(journal: Path) -> list[Path]:
    """Give the archives beside a journal, oldest first."""
    return sorted(item for item in journal.parent.iterdir() if _NAME.fullmatch(item.name))


def next_archive(journal: Path, most_bytes: int, keep: int) -> Path:
    """Give the archive to write to, a new one when the last has `most_bytes`, and remove all but the last `keep`."""
    found = archives(journal)
    if found and found[-1].stat().st_size < most_bytes:
        path = found[-1]
    else:
        match = _NAME.fullmatch(found[-1].name) if found else None
        number = int(match.group(1)) + 1 if match else 1
        path = journal.parent / f"journal-archive-{number:06d}.sqlite"
        path.touch(mode=0o600)
        found.append(path)
    for old in found[: max(len(found) - keep, 0)]:
        if old != path:
            old.unlink(missing_ok=True)
    return path


def move_batch(
    database: sqlite3.Connection, archive: Path, schema: str, version: int, *, before: float, most: int
) -> int:
    """Move up to `most` rows of each kind that are older than `before` (unix seconds); give how many went.

    Raises sqlite3.Error when the archive or the journal cannot be written; nothing is lost then.
    """
    database.execute("ATTACH DATABASE ? AS archive", (str(archive),))
    try:
        database.execute("PRAGMA archive.synchronous=FULL")
        if database.execute("PRAGMA archive.user_version").fetchone()[0] != version:
            database.execute("BEGIN")  # the version with the tables, or neither
            for statement in schema.split(";"):
                if "CREATE TABLE" in statement:
                    database.execute(statement.replace("IF NOT EXISTS ", "IF NOT EXISTS archive."))
            database.execute(f"PRAGMA archive.user_version={version}")
            database.execute("COMMIT")
        return sum(_move(database, table, where, before, most) for table, where in _OLD.items())
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")
        database.execute("DETACH DATABASE archive")


def _move(database: sqlite3.Connection, table: str, where: str, before: float, most: int) -> int:
    chosen = [
        (int(row[0]),)
        for row in database.execute(
            f"SELECT id FROM main.{table} AS {table} WHERE {where} ORDER BY id LIMIT :most",
            {"before": before, "most": most},
        )
    ]
    if not chosen:
        return 0
    database.execute("BEGIN")
    database.execute("CREATE TEMP TABLE IF NOT EXISTS moving (id INTEGER PRIMARY KEY)")
    database.execute("DELETE FROM temp.moving")
    database.executemany("INSERT INTO temp.moving VALUES (?)", chosen)
    among = "IN (SELECT id FROM temp.moving)"
    database.execute(f"INSERT OR REPLACE INTO archive.{table} SELECT * FROM main.{table} WHERE id {among}")
    if table == "windows":
        database.execute(
            f"INSERT OR REPLACE INTO archive.verdicts SELECT * FROM main.verdicts WHERE window {among}"
        )
        sessions = f"(SELECT session FROM main.windows WHERE id {among})"
        database.execute(
            f"INSERT OR REPLACE INTO archive.runs SELECT * FROM main.runs WHERE id IN {sessions}"
        )
        database.execute(
            f"INSERT OR REPLACE INTO archive.processes SELECT * FROM main.processes WHERE session IN {sessions}"
        )
    database.execute("COMMIT")
    database.execute("BEGIN IMMEDIATE")
    database.execute(f"DELETE FROM main.{table} WHERE id {among}")
    if table == "windows":
        database.execute(f"DELETE FROM main.verdicts WHERE window {among}")
    database.execute("COMMIT")
    return len(chosen)
