# SPDX-License-Identifier: Apache-2.0
"""Every sm90 kernel compiles without a GPU, spills nothing and contains no arithmetic that its specification lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")


@pytest.fixture(scope="module")
def built(script: Callable[..., Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = script("compiled.py")
    return found


def test_nothing_spills_and_registers_leave_room(built: dict[str, dict[str, int]]) -> None:
    assert len(built) >= 8
    # a tile of logits is 128 registers of an accumulator alone
    most = {n: 255 if n.startswith("linear_logprobs") else 192 for n in built}
    assert {n: b for n, b in built.items() if b["stack"] or b["local"] or b["registers"] > most[n]} == {}


def test_nothing_is_approximate_or_flushes_subnormals(built: dict[str, dict[str, int]]) -> None:
    assert {n: b for n, b in built.items() if b["approximate"] or b["flushing"]} == {}


def test_only_written_multiply_adds_are_fused(built: dict[str, dict[str, int]]) -> None:
    # exp is written with 9 of them; so many elements a thread
    assert {n: b["fused"] for n, b in built.items() if b["fused"] and "logprobs" not in n} == {
        "silu_mul": 9 * 16,
        "silu_mul gradient": 9 * 8,
        "sigmoid_mul": 9 * 8,
        "sigmoid_mul gradient": 9 * 8,
        "rms_norm gated": 9 * 16,
        "rms_norm gated gradient": 9 * 8,
    }


def test_an_exponential_of_the_logprobs_is_seven_multiply_adds(built: dict[str, dict[str, int]]) -> None:
    # so many terms a thread, and one for each maximum that a thread sees
    wanted = {
        "logprobs partials bf16": 7 * 64 + 8,
        "logprobs partials fp32": 7 * 32 + 8,
        "logprobs gradient bf16": 7 * 16,
        "linear_logprobs 128x128x64 w4 s3": 7 * 128 + 4,
        "linear_logprobs 128x256x64 w8 s3": 7 * 128 + 4,
        "linear_logprobs picked": 0,
    }
    assert {name: built[name]["fused"] for name in wanted} == wanted


def test_linears_use_the_tensor_cores(built: dict[str, dict[str, int]]) -> None:
    linears = {n: b["matrix"] for n, b in built.items() if n.startswith("linear")}  # and those without logits
    assert linears
    assert min(linears.values()) > 0
