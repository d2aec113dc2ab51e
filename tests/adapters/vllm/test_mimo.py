# SPDX-License-Identifier: Apache-2.0
"""A MiMo, whose query, key and value have a bias and whose last residual add no layer owns, under its contract in the engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from isoexec.adapters.census import Census

pytestmark = pytest.mark.vllm

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def found(
    request: pytest.FixtureRequest, run: Run, models: dict[str, str], pinned_mimo: str
) -> dict[str, Any]:
    dtype = request.param
    return {"dtype": dtype, **run("mimo", contract=pinned_mimo, first=models["mimo"], dtype=dtype)}


@pytest.fixture(scope="module")
def refused(
    run: Run, models: dict[str, str], pinned: str, pinned_mimo: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    data = yaml.safe_load(Path(pinned).read_text())
    data["composition"] = [b for b in data["composition"] if b["region"] != "qk_norm"]
    data["model"]["ops"] = [op for op in data["model"]["ops"] if op not in ("q_norm", "k_norm")]
    short = tmp_path_factory.mktemp("short") / "short.yaml"
    short.write_text(yaml.safe_dump(data))
    return run(
        "misfits",
        mimo=models["mimo"],
        qwen3=models["first"],
        mimo_contract=pinned_mimo,
        qwen3_contract=pinned,
        short_contract=str(short),
    )


def test_prefill_chunks_and_cached_prefixes_have_the_bits_of_decode(found: dict[str, Any]) -> None:
    assert sum(map(len, found["decode"])) == 16 * 16
    assert found["prefill"] == found["decode"]
    assert found["chunked"] == found["decode"]
    assert all(hit >= 96 for hit in found["hits"])
    assert (found["warm_tokens"], found["warm"]) == (found["cold_tokens"], found["cold"])


def test_the_regions_are_the_contracts_own_and_each_answers_its_canary(found: dict[str, Any]) -> None:
    (report,) = found["reports"]
    assert report["problems"] == []
    assert "qkv_bias" in report["regions"]
    assert "qk_norm" not in report["regions"]
    assert all(region["ok"] for region in report["regions"].values())
    assert report["regions"]["qkv_bias"]["object"].startswith(
        "vllm.model_executor.layers.linear.QKVParallelLinear[isoexec"
    )
    assert all(found["calls"].get(region, 0) > 0 for region in report["regions"])


def test_nothing_of_the_forward_is_added_outside_a_region(found: dict[str, Any]) -> None:
    census = Census.from_dict(found["census"])
    assert census.clean, census.text()
    assert min(census.inside.values()) > 0


def test_the_digests_of_bias_and_weight_are_the_checkpoints_without_its_draft_layers(
    found: dict[str, Any], models: dict[str, str]
) -> None:
    import torch
    from safetensors.torch import load_file

    from isoexec.probes.weights import tensor_partial

    stored = load_file(Path(models["mimo"]) / "model.safetensors")
    assert any(name.startswith("model.mtp_layers.") for name in stored)
    wanted = {
        name: list(tensor_partial(t.to(getattr(torch, found["dtype"])), t.shape, [0] * t.dim()))
        for name, t in stored.items()
        if not name.startswith("model.mtp_layers.")
    }
    assert found["weights"] == wanted
    assert sum(name.endswith("_proj.bias") for name in wanted) == 9


def test_a_lost_bias_is_seen_by_the_canary_the_digests_and_the_bits(found: dict[str, Any]) -> None:
    for report in (found["dropped_report"], found["absent_report"]):
        assert any(line.startswith("qkv_bias: ") for line in report), report
    assert found["dropped"] != found["decode"]
    assert found["zeroed"] == found["dropped"]
    names = {n for n, digest in found["weights"].items() if found["zeroed_weights"][n] != digest}
    assert names == {f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv"}
    assert found["again"] == found["decode"]


def test_two_ranks_have_the_bits_and_digests_of_one(
    run: Run, models: dict[str, str], pinned_mimo: str, found: dict[str, Any]
) -> None:
    if found["dtype"] == "bfloat16":  # one start of two ranks is enough here
        two = run("mimo", contract=pinned_mimo, first=models["mimo"], dtype="bfloat16", tp=2)
        for name in ("tokens", "decode", "prefill", "weights"):
            assert two[name] == found[name], name
        assert [r["problems"] for r in two["reports"]] == [[], []]


def test_the_bias_region_alone_answers_over_the_engine_s_own_linears(
    run: Run, models: dict[str, str], pinned_mimo: str
) -> None:
    alone = run("bias_alone", contract=pinned_mimo, first=models["mimo"])
    assert alone["report"]["problems"] == []
    assert alone["report"]["regions"]["column_linear"]["enforcement"] == "off"
    assert alone["report"]["regions"]["qkv_bias"]["ok"]
    assert sum(map(len, alone["decode"])) == 4 * 16


def test_a_bias_the_native_engine_widens_is_digested_as_it_was_loaded(
    run: Run, models: dict[str, str], found: dict[str, Any]
) -> None:
    if found["dtype"] == "bfloat16":
        native = run("native_bias", first=models["mimo"])["weights"]
        biases = {n for n in native if n.endswith("_proj.bias")}
        assert len(biases) == 9
        assert {n: native[n] for n in biases} == {n: found["weights"][n] for n in biases}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mimo_under_qwen3", r"architecture of \['Qwen3ForCausalLM'\]"),
        ("qwen3_under_mimo", r"architecture of \['MiMoForCausalLM', 'Qwen2ForCausalLM'\]"),
        ("native_class", "norm: wanted the last residual add in the norm that is bound"),
        ("biased_qwen3", "attention_bias"),
        ("short", "qk_norm: .*the contract has no such region, and the model runs one"),
    ],
)
def test_a_model_the_contract_does_not_speak_of_is_refused(
    refused: dict[str, Any], case: str, words: str
) -> None:
    assert re.search(words, refused[case]), refused[case]
