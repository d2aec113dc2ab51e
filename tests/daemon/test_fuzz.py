# SPDX-License-Identifier: Apache-2.0
"""A small count of the fuzzer of the daemon's doors; `tests/fuzz/ingest.py` by hand runs any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fuzz" / "ingest.py"


@pytest.mark.parametrize(("door", "count"), [("reader", 2000), ("frames", 120), ("http", 120)])
def test_no_input_breaks_a_door(door: str, count: int) -> None:
    found = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), "--door", door, "--count", str(count), "--seed", "6"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert f"{door}: {count} inputs" in found.stdout
