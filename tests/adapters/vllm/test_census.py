# SPDX-License-Identifier: Apache-2.0
"""The census of the real engine: clean in both cases under the contract, and not with anything planted in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from isoexec.adapters.census import Census

pytestmark = pytest.mark.vllm

PLANTED = {
    "a scaled output": ("aten::mul", "model.layers.1.input_layernorm"),
    "an in-place sum": ("aten::add_", "model.layers.1.mlp.gate_up_proj"),
    "a native norm": ("*", "model.layers.2.post_attention_layernorm"),
    "a native activation": ("*", "model.layers.0.mlp.act_fn"),
    "a native linear": ("*", "model.layers.1.mlp.gate_up_proj"),
    "fused attention": ("aten::*scaled_dot_product*", "model.layers.0.self_attn.q_norm"),
    "a cast of the logits": ("aten::*to*", "logits_processor"),
    "arithmetic on logprobs": ("aten::add", "*"),
}


@pytest.fixture(scope="module")
def found(run: Callable[..., dict[str, Any]], models: dict[str, str], pinned: str) -> dict[str, Census]:
    answer = run("planted", contract=pinned, first=models["first"])
    return {name: Census.from_dict(census) for name, census in answer.items()}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found_in_both_cases_with_module_and_stack(
    found: dict[str, Census], name: str
) -> None:
    from fnmatch import fnmatchcase

    operator, module = PLANTED[name]
    census = found[name]
    assert not census.clean
    for case in ("engine_prefill", "engine_decode"):
        here = [
            e
            for e in census.case(case)
            if fnmatchcase(e.operator, operator) and fnmatchcase(e.module, module)
        ]
        assert here, census.text()
        if not name.startswith("a native"):
            assert any("engine_tampers.py:" in e.stack[0] for e in here), census.text()


def test_the_same_engine_is_clean_before_and_after(found: dict[str, Census]) -> None:
    assert found["nothing"].clean, found["nothing"].text()


def census(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from isoexec.contracts.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, "census", *words], capture_output=True, text=True, timeout=280
    )


@pytest.mark.megatron
def test_the_command_finds_the_dense_model_clean_on_both_runtimes_in_all_five_cases(pinned: str) -> None:
    pytest.importorskip("megatron.core")
    done = census("--contract", pinned, "--format", "json")
    assert done.returncode == 0, done.stderr + done.stdout
    answer = json.loads(done.stdout)
    assert answer["clean"]
    cases = {case for runtime in answer["runtimes"] for case, inside in runtime["inside"].items() if inside}
    assert cases == {"engine_prefill", "engine_decode", "trainer_fwd", "trainer_recompute", "trainer_score"}


@pytest.mark.megatron
def test_the_command_says_what_a_runtime_without_a_contract_computes_and_fails() -> None:
    pytest.importorskip("megatron.core")
    done = census("--runtime", "megatron", "--contract", "none")
    assert done.returncode == 1, done.stderr
    assert "aten::mm (arithmetic)" in done.stdout
    assert "megatron/core/tensor_parallel/layers.py:" in done.stdout
    assert "not clean" in done.stdout
