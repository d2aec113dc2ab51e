# SPDX-License-Identifier: Apache-2.0
"""kill -9 of a daemon under load, N times at random moments: the journal opens each time, nothing acknowledged is missing.

    .venv-light/bin/python tests/soak/kill.py --kills 500

A verdict counts as acknowledged once anything outside the daemon could know of it: the lease of its step, or an answer over
HTTP. After each kill the journal must pass SQLite's check, have every acknowledged window with all of its verdicts, and no
window with a part of them. One line of JSON; exit code 1 when anything is missing. Old rows retire meanwhile, so archives
are looked into as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from common import peer_class  # type: ignore[import-not-found]  # beside this script

from isoexec.contracts.halting import LeaseError, LeasePage, LeaseState, StateDirectory
from isoexec.daemon.cli import run as run_daemon
from isoexec.daemon.http import HttpServer  # noqa: F401 - loaded here, so that a fork has it
from isoexec.daemon.retention import archives
from isoexec.daemon.service import Service  # noqa: F401
from isoexec.daemon.statistics import prepare

SETTINGS = (
    "quiet_seconds: 0\nsettle_seconds: 0.05\nframes_per_second: 100000\nsample_windows: 2\n"
    "journal_days: 0.001\njournal_archives: 10000\n"
)
ROWS = "/api/v1/runs/r/windows?limit=20"
CASES = (("engine", "engine_decode"), ("trainer", "trainer_score"))


class Acknowledged:
    """Steps that were known outside the daemon: what its lease said, and what it answered over HTTP."""

    def __init__(self, state: StateDirectory) -> None:
        self._state = state
        self.steps: set[int] = set()

    def look(self) -> None:
        """Look at the lease: its step was judged, and is to be in the journal."""
        with contextlib.suppress(LeaseError):
            with LeasePage.open(self._state.run("r").lease) as page:
                lease = page.read()
            if (
                lease.state in (LeaseState.OK, LeaseState.WARN)
                and lease.step >= 0
                and lease.rule != "journal"
            ):
                self.steps.add(lease.step)

    def ask(self) -> None:
        """Ask over HTTP."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            note = json.loads(self._state.daemon.read_text())
            with urllib.request.urlopen(note["http"] + ROWS, timeout=2) as answer:  # noqa: S310
                rows = json.loads(answer.read())["windows"]
            self.steps.update(row["window"]["step"] for row in rows)


def begin(state: StateDirectory) -> int:
    """Fork a daemon: all is loaded already, so that hundreds of starts take minutes."""
    pid = os.fork()
    if pid:
        return pid
    try:
        log = os.open(state.path / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        settings = state.path / "settings.yaml"
        code = run_daemon(
            [
                "--state-dir",
                str(state.path),
                "--http",
                "127.0.0.1:0",
                "--log",
                "json",
                "--config",
                str(settings),
            ]
        )
    finally:
        os._exit(code if "code" in locals() else 1)


def load(peers: list[Any], first: int, stop: threading.Event, reached: list[int]) -> None:
    """Send whole steps until the daemon is gone."""
    dice = np.random.default_rng(first)
    step = first
    with contextlib.suppress(OSError):
        while not stop.is_set():
            step += 1
            reached[0] = step
            values = dice.normal(-1, 0.5, (8, 64)).astype(np.float32)
            sequences = [([step, *range(row, row + 64)], 1, values[row]) for row in range(8)]
            for peer, (_, case) in zip(peers, CASES, strict=True):
                peer.weights(step, {"w": (step, 1)})
                peer.logprobs(case, step, sequences)
            peers[1].step(step)


def looked_at(path: Path) -> tuple[set[int], list[str]]:
    """Give the steps of whole windows, and what is wrong."""
    wrong: list[str] = []
    database = sqlite3.connect(path, timeout=10)
    try:
        said = database.execute("PRAGMA integrity_check").fetchone()[0]
        if said != "ok":
            wrong.append(f"{path.name}: {said}")
        if not database.execute("PRAGMA user_version").fetchone()[0]:
            return set(), wrong  # an archive that was never begun
        counts = database.execute(  # an archive has no index by window
            "SELECT step, coalesce(held, 0) FROM windows LEFT JOIN "
            "(SELECT window, count(*) AS held FROM verdicts GROUP BY window) ON window = windows.id"
        ).fetchall()
    except sqlite3.Error as error:
        return set(), [*wrong, f"{path.name}: {error}"]
    finally:
        database.close()
    most = max((count for _, count in counts), default=0)
    wrong.extend(
        f"{path.name}: step {step} has {count} of {most} verdicts" for step, count in counts if count != most
    )
    return {step for step, _ in counts}, wrong


def soak(kills: int, folder: Path, seed: int) -> dict[str, Any]:
    """Kill so many times and give what was seen."""
    state = StateDirectory(folder / "state").make()
    (state.path / "settings.yaml").write_text(SETTINGS)
    prepare()  # here, so that a fork has it
    kind, dice = peer_class(), random.Random(seed)  # noqa: S311
    known, wrong = Acknowledged(state), list[str]()
    archived: set[int] = set()
    seen_archives: dict[str, int] = {}
    step, began, idle = 0, time.monotonic(), 0
    for number in range(kills):
        pid = begin(state)
        peers: list[Any] = []
        try:
            deadline = time.monotonic() + 30
            while len(peers) < 2:
                try:
                    peers.append(kind(state.path, CASES[len(peers)][0]))
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.005)
            stop, reached = threading.Event(), [step]
            sender = threading.Thread(target=load, args=(peers, step, stop, reached))
            sender.start()
            before = len(known.steps)
            moment = time.monotonic() + dice.random() * 0.6
            asked = dice.random() < 0.3
            while time.monotonic() < moment:
                known.look()
                if asked and time.monotonic() > moment - 0.1:
                    asked = False
                    known.ask()
                time.sleep(0.001)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            for peer in peers:
                peer.stream.close()
        stop.set()
        sender.join()
        known.look()
        idle += len(known.steps) == before
        step = reached[0]
        found, faults = looked_at(state.journal)
        wrong.extend(f"kill {number}: {fault}" for fault in faults)
        for path in archives(state.journal):
            size = path.stat().st_size
            if seen_archives.get(path.name) != size:
                seen_archives[path.name] = size
                there, faults = looked_at(path)
                archived |= there
                wrong.extend(f"kill {number}: {fault}" for fault in faults)
        if missing := known.steps - found - archived:
            wrong.append(f"kill {number}: acknowledged and missing: steps {sorted(missing)[:10]}")
            known.steps -= missing
    return {
        "kills": kills,
        "steps_sent": step,
        "windows_kept": len(found | archived),
        "windows_archived": len(archived),
        "acknowledged_seen": len(known.steps),
        "kills_before_any_new_verdict": idle,
        "seconds": round(time.monotonic() - began, 1),
        "wrong": wrong,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="kill -9 of a daemon under load.")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="isoexec-kill-") as folder:
        result = soak(chosen.kills, Path(folder), chosen.seed)
    print(json.dumps(result))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
