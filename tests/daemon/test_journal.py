# SPDX-License-Identifier: Apache-2.0
"""The journal where the disk refuses it (a real limit on file size), and where old rows leave it, killed on the way."""

from __future__ import annotations

import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isoexec.contracts.verdict import RuleHistory, evaluate
from isoexec.contracts.window import Window
from isoexec.daemon import journal as journal_module
from isoexec.daemon.backlog import Backlog, Entry
from isoexec.daemon.cli import check
from isoexec.daemon.journal import Journal, JournalError
from isoexec.daemon.judge import rules_for
from isoexec.daemon.retention import KEPT_WINDOWS, archives

NOTHING = {"archive_bytes": 1 << 30, "keep_archives": 8}


def window(step: int) -> Window:
    return Window(run="r", regime="bitwise", monitor_only=True, step=step, weight_version=step)


def add(journal: Journal, session: int, step: int) -> None:
    one = window(step)
    journal.add_window(session, one, evaluate(rules_for("bitwise"), one, RuleHistory()))


def begun(path: Path) -> tuple[Journal, int]:
    journal = Journal.create(path)
    rules = [rule.to_dict() for rule in rules_for("bitwise")]
    session = journal.start_run(
        "r", regime="bitwise", monitor_only=True, policy="fail_open", data={"rules": rules}
    )
    return journal, session


def steps_of(path: Path) -> list[int]:
    journal = Journal.open(path)
    found = [row["window"]["step"] for row in journal.windows("r", limit=1 << 40)]
    whole = len(journal.verdicts("r", limit=1 << 40)) == len(found) * len(journal.last_verdicts("r"))
    journal.close()
    assert whole, "a window without all of its verdicts"
    return found


@contextmanager
def no_file_larger(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_costs_nothing_once_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal, session = begun(path)
    with no_file_larger(300_000):
        for step in range(1, 201):
            add(journal, session, step)
        journal.add_action("r", 200, "halt", {"why": "x"})
        second = journal.start_run("s", regime="bitwise", monitor_only=True, policy="fail_open", data={})
        assert journal.degraded
        assert journal.errors > 0
        assert "disk" in journal.last_error
        there = steps_of(path)
        # what is there is whole and without a hole, the rest waits
        assert there == list(range(1, len(there) + 1))
        assert 0 < len(there) < 200
        assert not journal.drain()
    deadline = time.monotonic() + 10
    while not journal.drain():
        assert time.monotonic() < deadline
    assert (journal.degraded, journal.lost) == (False, 0)
    assert steps_of(path) == list(range(1, 201))
    assert journal.actions("r")[0]["action"] == "halt"
    assert journal.open_session("s") is not None
    assert journal.open_session("s")[0] == second  # type: ignore[index]
    journal.close()


def test_too_much_that_waits_gives_up_steps_first_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "BACKLOG_BYTES", 100_000)
    path = tmp_path / "journal.sqlite"
    journal, _ = begun(path)
    with no_file_larger(1):
        for step in range(500):
            journal.add_step("r", step, {"seconds": {}})
            if step % 10 == 0:
                journal.add_action("r", step, "halt", {})
        lost = journal.lost
        assert lost > 0
        assert journal.waiting + lost == 550
    while not journal.drain():
        pass
    assert len(journal.actions("r")) == 50
    assert len(journal.steps("r", limit=1000)) == 500 - lost
    # the youngest were kept
    assert journal.steps("r", limit=1)[0]["step"] == 499
    journal.close()


def test_what_decides_goes_last_and_is_bounded_too() -> None:
    backlog = Backlog(10_000)
    for number in range(100):
        backlog.add(Entry(rows=(("s", (number, "x" * 100)),), decides=True))
    assert backlog.bytes <= 10_000
    assert len(backlog) + backlog.lost == 100
    assert backlog.first(1)[0].rows[0][1][0] == backlog.lost  # the oldest went


def test_a_journal_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with no_file_larger(1), pytest.raises(JournalError, match="free some disk"):
        Journal.create(tmp_path / "journal.sqlite")


def test_old_rows_move_to_an_archive_that_can_be_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal.sqlite"
    journal, session = begun(path)
    for step in range(1, 301):
        add(journal, session, step)
        journal.add_step("r", step, {})
    for number in range(20):
        journal.add_attestation("r", f"p{number % 4}", {"n": number})
    before = journal.size()
    moved = 0
    while part := journal.retire(before=time.time() + 1, most=50, **NOTHING):
        moved += part
    assert moved == (300 - KEPT_WINDOWS) + 300 + 16
    assert journal.size() < before / 2
    assert path.stat().st_size < before  # given back to the file system too
    assert steps_of(path) == list(range(301 - KEPT_WINDOWS, 301))
    assert {row["source"] for row in journal.attestations("r")} == {"p0", "p1", "p2", "p3"}
    (archive,) = archives(path)
    assert archive.stat().st_mode & 0o777 == 0o600
    assert steps_of(archive) == list(range(1, 301 - KEPT_WINDOWS))
    assert check([str(archive), "--run", "r"]) == check([str(path), "--run", "r"])
    assert f"{300 - KEPT_WINDOWS} windows" in capsys.readouterr().out
    journal.close()


def test_an_id_is_never_used_twice(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal, _ = begun(path)
    for step in range(10):
        journal.add_step("r", step, {})
    while journal.retire(before=time.time() + 1, **NOTHING):
        pass
    journal.close()
    journal = Journal.create(path)
    journal.add_step("r", 10, {})
    while journal.retire(before=time.time() + 1, **NOTHING):
        pass
    journal.close()
    kept = Journal.open(archives(path)[0])
    assert [row["step"] for row in kept.steps("r")] == list(range(11))
    kept.close()


def test_archives_are_many_at_most(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal, _ = begun(path)
    for step in range(100):
        journal.add_step("r", step, {"filler": "x" * 2000})
        journal.retire(before=time.time() + 1, archive_bytes=40_000, keep_archives=3)
    found = archives(path)
    assert len(found) == 3
    assert found[-1].name > "journal-archive-000003.sqlite"
    journal.close()


def test_what_cannot_be_archived_stays(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal, _ = begun(path)
    for step in range(50):
        journal.add_step("r", step, {})
    with no_file_larger(10_000):
        assert journal.retire(before=time.time() + 1, **NOTHING) == 0
        assert journal.errors > 0
    assert len(journal.steps("r")) == 50
    assert journal.retire(before=time.time() + 1, **NOTHING) == 50
    journal.close()


RETIRES = """
import sys, time
from pathlib import Path
from isoexec.contracts.verdict import RuleHistory, evaluate
from isoexec.contracts.window import Window
from isoexec.daemon.journal import Journal
from isoexec.daemon.judge import rules_for
journal = Journal.create(Path(sys.argv[1]))
step = int(sys.argv[2])
while True:
    step += 1
    one = Window(run='r', regime='bitwise', monitor_only=True, step=step, weight_version=step)
    journal.add_window(1, one, evaluate(rules_for('bitwise'), one, RuleHistory()))
    print(step, flush=True)
    if step % 7 == 0:
        journal.retire(before=time.time() + 1, archive_bytes=200_000, keep_archives=1000, most=20)
"""


def test_killed_while_rows_move_everything_is_in_one_of_the_two(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal, _ = begun(path)
    journal.close()
    said = 0
    dice = random.Random(5)  # noqa: S311
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-P", "-c", RETIRES, str(path), str(said)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(dice.random() * 0.5)
        writer.send_signal(signal.SIGKILL)
        said = max([said + 1, *map(int, writer.stdout.read().split())])
        writer.wait()
        writer.stdout.close()
        for one in (path, *archives(path)):
            database = sqlite3.connect(one)
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            database.close()
        found = {step for one in (path, *archives(path)) if one.stat().st_size for step in steps_of(one)}
        assert set(range(1, said + 1)) <= found
    assert archives(path)


def test_a_place_that_holds_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal.create(tmp_path)
