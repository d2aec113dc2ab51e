# SPDX-License-Identifier: Apache-2.0
"""A few rounds of the soak that kills a daemon under load hundreds of times, and that it sees what is missing."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from isoexec.daemon.journal import Journal

SOAK = Path(__file__).parents[1] / "soak" / "kill.py"


def test_five_kills_lose_nothing_that_was_acknowledged() -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(SOAK), "--kills", "5", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["wrong"]) == (0, []), done.stderr
    assert found["acknowledged_seen"] > 0
    assert found["kills"] == 5


def test_half_a_verdict_and_a_damaged_file_would_be_seen(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("isoexec_soak_kill", SOAK)
    assert spec is not None
    assert spec.loader is not None
    soak: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    path = tmp_path / "journal.sqlite"
    Journal.create(path).close()
    database = sqlite3.connect(path)
    for key, verdicts in ((1, 2), (2, 1)):
        database.execute("INSERT INTO windows VALUES (?, 1, 'r', ?, 0, '{}')", (key, key))
        for number in range(verdicts):
            values = (key * 10 + number, key)
            database.execute(
                "INSERT INTO verdicts VALUES (?, ?, 'r', 1, 'a', 'pass', 'none', 0, '{}')", values
            )
    database.commit()
    database.close()
    steps, wrong = soak.looked_at(path)
    assert steps == {1, 2}
    assert wrong == ["journal.sqlite: step 2 has 1 of 2 verdicts"]
    path.write_bytes(b"x" * 8192)
    assert soak.looked_at(path)[1]
