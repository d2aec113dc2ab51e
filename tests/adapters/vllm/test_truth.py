# SPDX-License-Identifier: Apache-2.0
"""Whatever is exchanged behind the adapter's back in a running engine is named by the next verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

TAMPERED = {
    # what is done (engine_tampers.tampers) -> region, or "" for the process; words of the problem
    "a kernel rebound where it is used": ("", "isoexec.adapters.vllm.cpu.silu_mul was replaced"),
    "an operator registered anew": ("", "was registered anew"),
    "a method of one object": ("norm", "model.layers.1.input_layernorm._forward_method was"),
    "a method of one object, with its bits": (
        "norm",
        "model.layers.1.input_layernorm.forward was set on the object",
    ),
    "a method of the class": ("", "IsoExecSiluAndMul.forward_native was replaced"),
    "a forward hook": ("row_linear", "model.layers.2.self_attn.o_proj.forward_hooks were 0 and are 1"),
    "the class of one module": ("row_linear", "model.layers.2.mlp.down_proj was of class"),
    "a subclass with the same bits": ("norm", "Faithful"),
    "one submodule of one layer": ("", "model.layers.0.mlp.act_fn was of class"),
    "the epsilon of one norm": ("norm", "variance_epsilon was 1e-06 and is 1e-05"),
    "the base of the rotation": ("rope", "base was"),
    "the table of the rotation": ("rope", "is not the table of the specification"),
    "the segment of one attention": (
        "attention",
        "model.layers.1.self_attn.attn.impl._kv_segment was 32 and is 64",
    ),
    "the segment of everything": ("attention", "kv_segment was 32 and is 64"),
    "the scale of one attention": ("attention", "impl.scale was"),
    "the block of one linear": (
        "column_linear",
        "gate_up_proj.isoexec_packed.k_block was 64 and is 32",
    ),
    "the leaves of the logprobs": ("logprobs", "sampler._leaves was 8 and is 4"),
    "a constant of the kernel": ("", "isoexec.kernels.linear.naive.ROW_TILE was 16 and is 8"),
    "the scale of the logits": ("", "logits_processor.scale was"),
    "the model's own code": ("", "Qwen3DecoderLayer.forward was replaced"),
    "the runner's method": ("", "runner._sample was set on the object"),
    "float32_matmul_precision": ("", "float32_matmul_precision was highest and is medium"),
    "flush_denormal": ("", "flush_denormal was False and is True"),
    "the number of threads": ("", "num_threads was 1 and is 2"),
    "oneDNN": ("", "mkldnn.enabled was True and is False"),
    "deterministic algorithms": ("", "deterministic_algorithms was False and is True"),
    "a variable": ("", "OMP_NUM_THREADS was 1 and is 2"),
    "a variable that was not set": ("", "ONEDNN_MAX_CPU_ISA was not set and is AVX2"),
}


@pytest.fixture(scope="module")
def seen(run: Callable[..., dict[str, Any]], models: dict[str, str], pinned: str) -> dict[str, Any]:
    return run("truth", contract=pinned, first=models["first"], second=models["second"])


@pytest.mark.parametrize("name", TAMPERED)
def test_what_is_exchanged_is_caught_and_named(seen: dict[str, Any], name: str) -> None:
    region, words = TAMPERED[name]
    found = seen[name]
    assert words in (found["regions"].get(region, "") if region else found["process"]), found


def test_an_engine_left_alone_has_nothing_to_report_before_or_after_a_sync_or_at_the_end(
    seen: dict[str, Any],
) -> None:
    assert seen["before"] == []
    assert seen["synced"] == []
    assert seen["after"] == []


def test_a_verification_costs_little_of_the_default_period(seen: dict[str, Any]) -> None:
    print(f"attest {seen['seconds'] * 1e3:.1f} ms, of it the comparison {seen['compare'] * 1e3:.1f} ms")
    assert seen["seconds"] < 3.0


def test_a_swap_between_syncs_is_raised_where_it_is_and_halts_the_run(
    run: Callable[..., dict[str, Any]],
    models: dict[str, str],
    pinned: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    state = tmp_path_factory.mktemp("periodic") / "state"
    found = run("periodic", contract=pinned, first=models["first"], state=str(state))
    words = "model.layers.1.mlp.gate_up_proj.forward_hooks were 0 and are 1"
    assert found["steps"] >= 2
    assert found["marker_before"] == "None"
    assert found["raised"].startswith("InstallError: column_linear: wanted")
    assert words in found["raised"]
    assert found["rule"] == "kernel_replaced"
    assert words in found["evidence"]
    print(f"raised {found['seconds']:.2f} s after the swap, period 0.2 s")
