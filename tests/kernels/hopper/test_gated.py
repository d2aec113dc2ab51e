# SPDX-License-Identifier: Apache-2.0
"""The sm90 gates, without a GPU: every check at tiny sizes in Triton's interpreter, and the records that a GPU made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.contracts.evidence import Store, shipped
from isoexec.kernels import registry
from isoexec.kernels.gates.checking import subject
from isoexec.kernels.gates.found import constants_of, contracts_for, gate_for, gated

SCRIPT = Path(__file__).with_name("gated.py")
OPS = ("linear", "logprobs", "rms_norm", "rope", "silu_mul")
FAMILIES = (
    "batch_invariance",
    "case_parity",
    "conformance",
    "degenerate_shapes",
    "partition_invariance",
    "rerun_determinism",
)
FUNCTIONS = {
    "linear": "linear.mma_chain/1",
    "logprobs": "logprobs.blocks/1",
    "rms_norm": "rms_norm.pairs/1",
    "rope": "rope.neox_fp32/1",
    "silu_mul": "silu_mul.poly/1",
}


@pytest.mark.parametrize("op", OPS)
def test_every_check_holds_in_the_interpreter(op: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), op], capture_output=True, text=True, env=environment, timeout=290
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(run.stdout)
    families = sorted(gate_for(FUNCTIONS[op], "sm90").families)
    assert sorted(found) == [f"{op} {family}" for family in families]
    for name, lines in found.items():
        assert len(lines) == 1, (name, lines)
        assert int(lines[0].removesuffix(" elements")) > 5, (name, lines)


def test_every_own_function_of_the_arch_has_a_gate() -> None:
    there = gated("sm90")
    assert {function: there[function] for function in FUNCTIONS.values()} == dict.fromkeys(
        FUNCTIONS.values(), True
    )
    for function in FUNCTIONS.values():
        assert set(gate_for(function, "sm90").families) >= set(FAMILIES)
    assert "backward" in gate_for("linear.mma_chain/1", "sm90").families


@pytest.mark.parametrize("function", FUNCTIONS.values())
def test_a_record_made_on_a_gpu_is_of_the_sources_that_lie_here(function: str) -> None:
    ours = subject(function, "sm90")
    found = Store([shipped()]).find(function=function, provider=ours.name, arch="sm90")
    assert found, f"no record of {function} on sm90 is committed"
    newest = found[0]
    assert newest.provider == ours, "run the gates again on a GPU: the kernel's source is another"
    assert newest.gate == gate_for(function, "sm90").digest(), (
        "run the gates again on a GPU: the gate is another"
    )
    assert newest.profile == "full"
    assert newest.environment["gpu"] == "NVIDIA H200"
    sets = constants_of(function, contracts_for("sm90"))
    assert sets
    for constants in sets:
        registry.check_constants(function, constants)
        for family in gate_for(function, "sm90").families:
            check = newest.check(family, constants)
            assert check is not None, (family, constants)
            assert check.failures() == []
