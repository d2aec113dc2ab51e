# SPDX-License-Identifier: Apache-2.0
"""The sm90 kernels in Triton's interpreter against their specifications, one process for all checks of `interpreted.py`."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

SCRIPT = Path(__file__).with_name("interpreted.py")
CHECKS = [
    n.name
    for n in ast.parse(SCRIPT.read_text()).body
    if isinstance(n, ast.FunctionDef) and any(getattr(d, "id", "") == "check" for d in n.decorator_list)
]


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=580
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, str] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_in_the_interpreter(name: str, results: dict[str, str]) -> None:
    assert results[name] == ""
