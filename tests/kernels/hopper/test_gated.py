# SPDX-License-Identifier: Apache-2.0
"""The sm90 gates, without a GPU: every check at tiny sizes in Triton's interpreter, and the records that a GPU made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.contracts.evidence import Store, shipped
from isoexec.kernels import registry
from isoexec.kernels.gates.checking import subject
from isoexec.kernels.gates.found import constants_of, contracts_for, gate_for, gated

# what one process checks: most of a small op's time is the start of its process
TOGETHER = (
    ("linear",),
    ("logprobs",),
    ("linear_logprobs",),
    ("router", "router.sigmoid", "dispatch"),
    ("combine", "grouped_linear", "shared_gate"),
    ("rms_norm", "rms_norm_centred", "rms_norm_gated", "l2_norm"),
    ("rope", "rope_interleaved", "rope_yarn", "silu_mul", "sigmoid_mul", "embedding", "bias", "grad_norm"),
)
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
    "logprobs": "logprobs.blocks/2",
    "linear_logprobs": "linear_logprobs.mma_blocks/1",
    "rms_norm": "rms_norm.pairs/1",
    "rms_norm_centred": "rms_norm.pairs_centred/1",
    "rms_norm_gated": "rms_norm.pairs_gated/1",
    "l2_norm": "l2_norm.pairs/1",
    "rope": "rope.neox_fp32/1",
    "rope_interleaved": "rope.interleaved_fp32/1",
    "rope_yarn": "rope.yarn_interleaved_fp32/1",
    "silu_mul": "silu_mul.poly/1",
    "sigmoid_mul": "gate.sigmoid_mul/1",
    "embedding": "embedding.lookup/1",
    "bias": "bias.add/1",
    "grad_norm": "grad_norm.exact/1",
    "router": "router.softmax_topk/1",
    "router.sigmoid": "router.sigmoid_topk/1",
    "dispatch": "moe.dispatch/1",
    "combine": "moe.combine/1",
    "shared_gate": "moe.shared_gate/1",
    "grouped_linear": "linear.grouped_mma_chain/1",
}


@pytest.mark.parametrize("ops", TOGETHER)
def test_every_check_holds_in_the_interpreter_and_its_record_would_discharge_contracts(
    ops: tuple[str, ...], script: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, dict[str, Any]] = script("gated.py", *ops)
    assert sorted(found) == sorted(
        f"{op} {family}" for op in ops for family in gate_for(FUNCTIONS[op], "sm90").families
    )
    covered: dict[str, dict[str, Any]] = {}
    for name, one in found.items():
        assert one["failures"] == [], name
        # the gradient's norm is one number
        assert one["elements"] > (0 if "grad_norm" in name else 5), (name, one)
        op, family = name.split()
        covered.setdefault(FUNCTIONS[op], {})[family] = one["domain"]
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert importlib.import_module("discharging").left(covered, tmp_path) == {}


def test_every_own_function_of_the_arch_has_a_gate() -> None:
    there = gated("sm90")
    assert {function: there[function] for function in FUNCTIONS.values()} == dict.fromkeys(
        FUNCTIONS.values(), True
    )
    for function in FUNCTIONS.values():
        assert set(gate_for(function, "sm90").families) >= set(FAMILIES)
    assert {
        function for function in FUNCTIONS.values() if "backward" not in gate_for(function, "sm90").families
    } <= {"logprobs.blocks/1"}


@pytest.mark.parametrize("function", FUNCTIONS.values())
def test_a_record_made_on_a_gpu_is_of_the_sources_that_lie_here(function: str) -> None:
    ours = subject(function, "sm90")
    found = Store([shipped()]).find(function=function, provider=ours.name, arch="sm90")
    if not found:  # a source that no GPU has proven yet: nothing may rest on it
        for contract in contracts_for("sm90"):
            assert {b.discharge.kind for b in contract.composition if b.function == function} <= {"none"}
            assert {p.discharge.kind for p in contract.providers if p.function == function} <= {"none"}
        return
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
