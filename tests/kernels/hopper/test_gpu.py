# SPDX-License-Identifier: Apache-2.0
"""The quick gates of the sm90 kernels on a real Hopper GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isoexec.kernels.gates.found import contracts_for, gated
from isoexec.kernels.gates.running import State, jobs_of, run_gates


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no GPU of compute capability 9.0 here; bits of tensor cores cannot be checked without one",
)
@pytest.mark.parametrize("function", [name for name, there in gated("sm90").items() if there])
def test_a_gate_holds_on_the_gpu(function: str, tmp_path: Path) -> None:
    jobs = jobs_of([function], "sm90", contracts_for("sm90"), full=False)
    (outcome,) = run_gates(jobs, State(tmp_path), fresh=True, said=lambda *_: None)
    assert outcome.failures == ()
    assert len(outcome.checks) == len(jobs)
