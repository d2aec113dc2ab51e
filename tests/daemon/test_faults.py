# SPDX-License-Identifier: Apache-2.0
"""Faults of what a running daemon stands on: its socket's file goes, its journal is old, it is started anew."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from isoexec.contracts.halting import LeasePage, LeaseState, Policy, StateDirectory
from isoexec.contracts.verdict import RuleHistory, evaluate
from isoexec.contracts.window import Window
from isoexec.daemon.journal import Journal
from isoexec.daemon.judge import rules_for
from isoexec.daemon.retention import KEPT_WINDOWS, archives

BITS = np.array([-1.0, -2.25, -0.5], np.float32)
SEQUENCES = [([1, 2, 3, 4, 5], 2, BITS)]


def test_a_socket_that_is_removed_is_made_anew_and_open_streams_stay(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    daemon = start()
    engine = peer(daemon, "engine")
    path = daemon.state.socket
    for replace in (False, True):
        path.unlink()
        if replace:
            path.write_text("something else")
        wait_until(path.is_socket, "a socket")
        assert path.stat().st_mode & 0o777 == 0o600
        assert peer(daemon, "trainer", rank=int(replace)).welcome.accepted
    engine.logprobs("engine_decode", 1, SEQUENCES)
    wait_until(
        lambda: daemon.metric("isoexec_messages_received_total", run="r", role="engine", type="logprobs"),
        "what the first stream sent",
    )
    assert daemon.json("/readyz")["ready"]
    assert (daemon.state_dir / "daemon.log").read_text().count("the socket was gone") == 2


def test_a_running_daemon_retires_old_rows_and_goes_on_writing(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any], tmp_path: Path
) -> None:
    state = StateDirectory(tmp_path / "state").make()
    journal = Journal.create(state.journal)
    session = journal.start_run("old", regime="bitwise", monitor_only=True, policy="fail_open", data={})
    window = Window(run="old", regime="bitwise", monitor_only=True, step=1, weight_version=1)
    journal.add_window(session, window, evaluate(rules_for("bitwise"), window, RuleHistory()))
    journal.end_run(session)
    journal.close()
    count = KEPT_WINDOWS + 1300
    with sqlite3.connect(state.journal) as database:
        database.execute("UPDATE windows SET time = time - 40 * 86400")
        columns = "session, run, ?, time, data FROM windows WHERE id = 1"
        database.executemany(
            f"INSERT INTO windows SELECT ?, {columns}",
            [(key, key) for key in range(2, count + 1)],
        )
    database.close()
    daemon = start(journal_days=30)
    engine, trainer = peer(daemon, "engine"), peer(daemon, "trainer")
    engine.logprobs("engine_decode", 1, SEQUENCES)
    trainer.logprobs("trainer_score", 1, SEQUENCES)
    trainer.step(1)

    def steps(path: Path) -> list[int]:
        reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return [
                row[0] for row in reader.execute("SELECT step FROM windows WHERE run = 'old' ORDER BY step")
            ]
        finally:
            reader.close()

    # more than one batch: one a second until nothing is left that may go
    wait_until(lambda: len(steps(state.journal)) == KEPT_WINDOWS, "the old rows to be gone", 60)
    (archive,) = archives(state.journal)
    assert steps(archive) + steps(state.journal) == list(range(1, count + 1))
    (found,) = daemon.windows()
    assert found["step"] == 1
    assert daemon.metric("isoexec_journal_degraded") == 0
    assert {row["run"] for row in daemon.json("/api/v1/runs")["runs"]} == {"old", "r"}


def test_a_daemon_started_anew_takes_up_the_lease_before_anyone_says_hello(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    directory = StateDirectory(tmp_path / "state").make().run("r")
    directory.path.mkdir(parents=True)
    with LeasePage.create(directory.lease) as page:
        page.write(LeaseState.WARN, policy=Policy.FAIL_CLOSED, ttl_seconds=50.0, step=3)
        left = page.read().deadline_ns
    start()
    with LeasePage.open(directory.lease) as page:
        lease = page.read()
    assert lease.deadline_ns != left
    assert (lease.state, lease.policy, lease.step) == (LeaseState.WARN, Policy.FAIL_CLOSED, 3)


def test_the_daemon_starts_without_the_commands_beside_it() -> None:
    code = "import sys, isoexec.daemon.service; print('isoexec.daemon.bundle' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "False\n", done.stderr
