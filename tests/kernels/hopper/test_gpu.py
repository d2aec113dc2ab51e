# SPDX-License-Identifier: Apache-2.0
"""Every gate of the sm90 kernels on a real Hopper GPU: the bench's own, without its times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench" / "hopper_kernels.py"


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no GPU of compute capability 9.0 here; bits of tensor cores cannot be checked without one",
)
def test_every_gate_passes_on_the_gpu(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(BENCH), "--gates-only"],
        capture_output=True,
        text=True,
        env={**os.environ, "OUT": str(tmp_path)},
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert " 0 failed" in run.stdout
