# SPDX-License-Identifier: Apache-2.0
"""The demo, run as a user would, on the real engines: equality under the contract, and a replaced kernel that halts the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.megatron, pytest.mark.prometheus, pytest.mark.timeout(400)]


def test_contract_phase_is_bitwise_equal_and_a_replaced_kernel_halts_the_job(tmp_path: Path) -> None:
    report = tmp_path / "report"
    command = [sys.executable, "-P", "-m", "isoexec.contracts.main", "demo", "--phases", "contract-tp2,fault"]
    done = subprocess.run(
        [*command, "--fault", "kernel", "--steps", "2", "--report", str(report)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    contract, fault = json.loads((report / "report.json").read_text())
    mismatch = contract["mismatch"]
    assert mismatch["tokens"] == 2 * 4096
    assert mismatch["bitwise_equal"] == mismatch["tokens"]
    assert contract["verdict"] == "pass"
    assert contract["steps"][-1]["reward"] > 0
    assert fault["verdict"] == "violation"
    assert "norm" in fault["cause"] or "kernel" in fault["cause"]
    lines = "\n".join(fault["lines"])
    assert "updates after the verdict: 0" in lines
    assert "restart before `isoexec clear`: refused" in lines
    assert "restart after `isoexec clear`: starts" in lines
    assert "IsoexecKernelReplaced is firing" in lines
    assert (report / "plot.png").stat().st_size > 10_000
    replay = subprocess.run(
        [sys.executable, "-P", "-m", "isoexec.contracts.main", "check", str(report / "journal.sqlite")],
        capture_output=True,
        text=True,
    )
    assert replay.returncode == 1, replay.stderr  # the violation is in it
    assert "demo-fault-kernel" in replay.stdout
    assert "isoexec_" in (report / "metrics.txt").read_text()
