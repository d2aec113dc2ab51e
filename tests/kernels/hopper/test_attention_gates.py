# SPDX-License-Identifier: Apache-2.0
"""The sm90 attention's gates without a GPU: every check at tiny sizes in Triton's interpreter, and who runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.contracts.evidence import FAMILIES
from isoexec.contracts.schema import library
from isoexec.kernels.gates.found import contracts_for, gate_for
from isoexec.kernels.gates.running import jobs_of

FUNCTIONS = {
    "attention": "attention.mma_segments/1",
    "attention_cudnn": "attention.mma_segments_cudnn/1",
    "window_attention": "attention.mma_window/1",
}


# that of windows is attention's under another constant: `gated_attention.py window_attention` takes a minute
@pytest.mark.parametrize("op", ["attention", "attention_cudnn"])
def test_every_check_holds_in_the_interpreter(op: str, script: Callable[..., Any]) -> None:
    gate = gate_for(FUNCTIONS[op], "sm90")
    assert gate.families == tuple(FAMILIES)
    found: dict[str, list[str]] = script("gated_attention.py", op, interpreted=True)
    assert sorted(found) == sorted(f"{op} {family}" for family in gate.families)
    for name, lines in found.items():
        assert len(lines) == 1, (name, lines)
        assert int(lines[0].removesuffix(" elements")) > 100, (name, lines)


def test_a_contract_with_a_window_has_its_gate_run_under_its_constants(tmp_path: Path) -> None:
    text = library("qwen3-dense-sm90").read_text()
    for plain, windowed in (
        ("attention.mma_segments/1", "attention.mma_window/1"),
        ("{kv_segment: 4096}", "{kv_segment: 4096, window: 1024}"),
        ("isoexec.kernels.attention.hopper", "isoexec.kernels.window_attention.hopper"),
    ):
        assert plain in text
        text = text.replace(plain, windowed)
    (tmp_path / "windowed.yaml").write_text(text)
    contracts = contracts_for("sm90", [tmp_path / "windowed.yaml"])
    jobs = jobs_of([FUNCTIONS["window_attention"]], "sm90", contracts, full=True)
    assert {job.family for job in jobs} == set(FAMILIES)
    assert all(job.constants == {"kv_segment": 4096, "window": 1024} for job in jobs)
