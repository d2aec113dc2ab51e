# SPDX-License-Identifier: Apache-2.0
"""Every sm90 kernel compiles without a GPU, spills nothing and contains no arithmetic that its specification lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled.py")
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=280
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_nothing_spills_and_registers_leave_room(built: dict[str, dict[str, int]]) -> None:
    assert len(built) >= 8
    assert {n: b for n, b in built.items() if b["stack"] or b["local"] or b["registers"] > 192} == {}


def test_nothing_is_approximate_or_flushes_subnormals(built: dict[str, dict[str, int]]) -> None:
    assert {n: b for n, b in built.items() if b["approximate"] or b["flushing"]} == {}


def test_only_written_multiply_adds_are_fused(built: dict[str, dict[str, int]]) -> None:
    # exp is written with 9 of them; so many elements a thread
    assert {n: b["fused"] for n, b in built.items() if b["fused"]} == {
        "silu_mul": 9 * 16,
        "silu_mul gradient": 9 * 8,
        "sigmoid_mul": 9 * 8,
        "sigmoid_mul gradient": 9 * 8,
        "rms_norm gated": 9 * 16,
        "rms_norm gated gradient": 9 * 8,
        "logprobs partials": 9 * 64,
        "logprobs merge": 9 * 4,
    }


def test_linears_use_the_tensor_cores(built: dict[str, dict[str, int]]) -> None:
    linears = {n: b["matrix"] for n, b in built.items() if n.startswith("linear")}
    assert linears
    assert min(linears.values()) > 0
