# SPDX-License-Identifier: Apache-2.0
"""vLLM for CUDA as far as a machine without a GPU tells: which engine, arguments, hooks, metadata, what is compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isoexec.contracts.errors import InstallError
from isoexec.contracts.schema import library

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")
GONE = "logprobs: 0 of them"
SCRIPT = Path(__file__).with_name("cuda_script.py")
ENVIRONMENT = {
    "arch": "sm90",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cublaslt": "13.0",
    "cuda.blas": "Cublas",
    "cuda.matmul.bf16_reduced_precision": True,
    "cuda.matmul.bf16_split_k": True,
    "float32_matmul_precision": "highest",
    "autocast.cuda": False,
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `cuda_script.py` found."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "VLLM_PLUGINS": "isoexec", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of a machine with a Hopper GPU and vLLM 0.25.1, its switches as torch starts."""
    from isoexec.adapters.vllm import engines

    monkeypatch.setenv("ISOEXEC_CONTRACT", "")
    monkeypatch.delenv("ISOEXEC_CONTRACT")
    monkeypatch.setattr(engines, "installed_version", {"vllm": "0.25.1"}.get)
    monkeypatch.setattr("isoexec.adapters.base.arch", lambda: "sm90")
    monkeypatch.setattr("isoexec.adapters.base.require_evidence", lambda *_: None)
    monkeypatch.setattr("isoexec.adapters.vllm.adapter.claimable_environment", lambda: ENVIRONMENT)


def args(name: str = "qwen3-dense-sm90", **user: Any) -> dict[str, Any]:
    from isoexec.adapters.vllm.adapter import engine_args

    return engine_args(library(name), model="m", dtype="bfloat16", **user)


@pytest.mark.parametrize(
    ("version", "admitted"), [("0.24.0", False), ("0.25.0", True), ("0.26.0", True), ("0.27.0", False)]
)
def test_the_engine_is_chosen_by_its_distribution_and_version(
    version: str, admitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isoexec.adapters.vllm import engines

    monkeypatch.setattr(engines, "installed_version", {"vllm": version}.get)
    if admitted:
        engine, found = engines.require_engine()
        assert (engine.arch, engine.worker.rpartition(".")[2], found) == (
            "sm90",
            "IsoExecCUDAWorker",
            version,
        )
        return
    with pytest.raises(InstallError) as refused:
        engines.require_engine()
    assert "vllm >=0.25.0,<0.27.0" in refused.value.wanted
    assert refused.value.found == f"vllm {version}"


def test_a_contract_of_another_arch_is_refused(on_a_gpu: None) -> None:
    with pytest.raises(InstallError, match="an engine of arch cpu"):
        args("qwen3-dense-cpu")


def test_arguments_keep_graphs_and_the_compiler_and_fail_closed(on_a_gpu: None) -> None:
    given = args(max_model_len=4096, compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"})
    assert "enforce_eager" not in given
    assert (given["quantization"], given["attention_backend"]) == ("isoexec", "CUSTOM")
    compilation = given["compilation_config"]
    assert compilation["custom_ops"] == ["all"]
    assert compilation["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert compilation["pass_config"]
    assert not any(compilation["pass_config"].values())
    said = given["additional_config"]["isoexec"]
    assert said["contract"]["name"] == "qwen3-dense-sm90"
    assert {"attention", "lm_head", "logprobs", "norm"} <= set(said["installs"])


@pytest.mark.parametrize(
    ("user", "region"),
    [
        ({"compilation_config": {"custom_ops": ["none"]}}, "compilation_config"),
        ({"compilation_config": 3}, "compilation_config"),
        ({"attention_backend": "FLASH_ATTN"}, "attention_backend"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        (
            {"speculative_config": {"method": "eagle", "attention_backend": "FLASH_ATTN"}},
            "speculative_config",
        ),
        ({"speculative_config": {"method": "eagle", "quantization": "isoexec"}}, "speculative_config"),
        ({"logprobs_mode": "raw_logits"}, "logprobs"),
    ],
)
def test_an_argument_that_contradicts_the_contract_is_refused(
    user: dict[str, Any], region: str, on_a_gpu: None
) -> None:
    with pytest.raises(InstallError) as refused:
        args(**user)
    assert refused.value.region == region


def test_drafts_are_taken_as_they_are_asked_for(on_a_gpu: None) -> None:
    asked = {"method": "eagle", "model": "draft", "num_speculative_tokens": 3}
    assert args(speculative_config=asked)["speculative_config"] == asked
    assert "speculative_config" not in args()


def test_a_worker_refuses_drafts_that_engine_args_would_not_have_let_through(on_a_gpu: None) -> None:
    from isoexec.adapters.vllm.boundary import _refuse_drafts

    _refuse_drafts(None)
    _refuse_drafts(SimpleNamespace(method="eagle3"))
    with pytest.raises(InstallError, match="speculative decoding by ngram"):
        _refuse_drafts(SimpleNamespace(method="ngram"))


def test_a_switch_the_worker_does_not_claim_is_still_judged(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {**ENVIRONMENT, "float32_matmul_precision": "high"}
    monkeypatch.setattr("isoexec.adapters.vllm.adapter.claimable_environment", lambda: changed)
    with pytest.raises(InstallError, match="float32_matmul_precision is high"):
        args()


def test_every_region_has_a_hook_that_can_be_taken_out_again(found: dict[str, Any]) -> None:
    assert all(owner.startswith("isoexec.adapters.vllm.cuda") for owner in found["registered"].values())
    assert {"column_linear", "qkv_bias", "lm_head", "attention", "rope"} <= set(found["registered"])
    assert found["removed"]
    assert found["experts"] == "router: router, routing, dispatch, expert_linear, combine"
    assert found["windowed"] == "attention: a sliding window"


def test_the_compiler_sees_one_opaque_op_a_region(found: dict[str, Any]) -> None:
    assert found["traced"] == [
        f"isoexec.sm90_{name}.default"
        for name in (
            *("add_rms_norm", "bias_add", "embedding", "linear", "rms_norm", "rope", "silu_mul_halves"),
        )
    ]


def test_rotary_tables_are_the_specifications_under_the_loaders_dtype(found: dict[str, Any]) -> None:
    assert found["tables"] is True


def test_chunks_drafts_and_padded_decodes_in_pages_are_whole_sequences(found: dict[str, Any]) -> None:
    attention = found["attention"]
    assert attention["differ"] == [0, 0, 0]
    assert attention["elements"] > 10_000


def test_rows_without_positions_are_refused_where_a_request_has_more_than_one(found: dict[str, Any]) -> None:
    assert (
        "attention: wanted a position for each row in the step's metadata, found none"
        in found["attention"]["refused"]
    )


def test_what_a_graph_holds_is_filled_again_where_it_lies(found: dict[str, Any]) -> None:
    attention = found["attention"]
    assert attention["kept"] == [True, True]
    assert attention["addresses"]
    assert attention["keys"] == [[4, 4, 1]]
    assert attention["filled_by_one"]


def test_a_step_whose_buffers_are_not_those_its_graph_reads_is_refused(found: dict[str, Any]) -> None:
    assert (
        "attention: wanted a step's tables in the buffers that its graph reads, found other buffers"
        in found["attention"]["moved"]
    )


def test_a_drafting_heads_steps_say_no_positions_and_are_those_that_were_captured(
    found: dict[str, Any],
) -> None:
    assert found["attention"]["drafting"] == [True, True]


def test_logprobs_of_the_engines_function_are_the_contracts(found: dict[str, Any]) -> None:
    assert found["logprobs"] == {
        "shape": [3, 3],
        "equal": True,
        "asked": True,
        "exchanged": False,
        "gone": GONE,
    }


def test_every_layer_is_asked_with_the_steps_of_one_attention_canary(found: dict[str, Any]) -> None:
    canary = found["attention_canary"]
    last = canary["tokens"] - 1
    assert canary["differ"] == [[], [], [last - 1, last], []]
    assert canary["rows"] == [42, 38, 3, 1, 1]
    assert canary["plans"] == len(canary["rows"])


def test_compiled_code_is_held_to_the_layers_at_every_number_of_rows(found: dict[str, Any]) -> None:
    said = found["compiled"]
    assert said["same"] is None
    assert said["alone"] == "compiled code differs from the layers in 1 elements before attention 1, 1 rows"
    assert (
        said["last"] == "compiled code differs from the layers in 1 elements before the last layer, 19 rows"
    )
    assert said["fewer"] == "compiled code hands on 2 tensors, the layers 3"
    assert "torch.bfloat16 [19, 8] before attention 0, the layers torch.bfloat16 [1, 8]" in said["shape"]


def test_graphs_of_head_and_logprobs_serve_a_sampled_step_alone(found: dict[str, Any]) -> None:
    said = found["graphs"]
    own = {"own": True, "logprobs": True, "processed": None, "fewer": None, "again": None}
    assert [said[f"rows {rows}"] for rows in (1, 3, 8)] == [own] * 3
    elsewhere = ("outside", "more", "logprobs outside", "after an error", "captured", "moved")
    assert [said[where] for where in elsewhere] == [None] * len(elsewhere)


def test_logprobs_of_a_graph_outlive_its_next_replay(found: dict[str, Any]) -> None:
    assert found["graphs"]["copies"] == [True, True, True]


def test_a_graph_with_other_bits_than_its_functions_is_found(found: dict[str, Any]) -> None:
    said = found["graphs"]
    assert said["sound"] is None
    assert said["later"] == "the graph of 1 rows differs from its functions in 1 logits of the first 1"
    assert said["flipped"] == (
        "lm_head: the graph of 2 rows differs from its functions in 1 logits of the first 2"
    )
    assert said["asked"] is None  # it serves nobody any more


def test_a_worker_records_its_head_where_the_engine_captures_and_logprobs_where_it_is_whole(
    found: dict[str, Any],
) -> None:
    said = found["record"]
    assert said["captures"] == {
        "given": [True, [1, 2], 8],
        "serves": True,
        "sample": ["within", "sample"],
        "refused": "nothing",
    }
    assert said["ranks"] == {**said["captures"], "given": [True, [1, 2], None]}
    assert said["eager"] == {"given": None, "serves": False, "sample": "sample", "refused": "nothing"}
    assert said["other runner"] == "lm_head: no such method"
    assert said["runner"]
