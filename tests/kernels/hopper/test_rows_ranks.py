# SPDX-License-Identifier: Apache-2.0
"""What ranks exchange in the sm90 row ops, between real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")


def test_two_ranks_have_the_bits_of_one() -> None:
    # imported by name, so that the ranks find its functions
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", "import rows_ranks; rows_ranks.main()"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=580,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, str] = json.loads(run.stdout)
    assert len(found) == 19
    assert {name: why for name, why in found.items() if why} == {}
