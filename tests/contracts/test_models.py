# SPDX-License-Identifier: Apache-2.0
"""A model's config.json gives its facts, in every spelling, and a field that makes no sense is an error that names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoexec.contracts.errors import ContractError
from isoexec.contracts.models import FIELDS, config_of, facts_of, read_config, text_facts
from isoexec.contracts.models.families import FAMILIES

MODELS = Path(__file__).parent / "models"
QWEN3 = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
MOE = json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text())
NEXT = json.loads((MODELS / "qwen3-next-80b-a3b" / "config.json").read_text())
HYBRID = json.loads((MODELS / "qwen3.5-9b" / "config.json").read_text())
GLM = json.loads((MODELS / "glm-4.7-flash" / "config.json").read_text())


def facts(config: Mapping[str, Any], **change: Any) -> dict[str, int | str | bool]:
    """Facts of a config with fields changed; None takes a field away."""
    whole = {name: value for name, value in {**config, **change}.items() if value is not None}
    return facts_of(config_of(whole, "config.json"))


@pytest.mark.parametrize(
    ("folder", "wanted"),
    [
        (
            "qwen3-8b",
            {"hidden_size": 4096, "intermediate_size": 12288, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128},
        ),
        ("qwen3-4b", {"tied_head": True, "hidden_size": 2560, "head_dim": 128}),
        ("mimo-7b-rl", {"attention_bias": True, "intermediate_size": 11008, "vocab_size": 151680, "mtp_layers": 1}),
        (
            "qwen3-30b-a3b",
            {"experts": 128, "experts_per_token": 8, "expert_size": 768, "router_score": "softmax", "dense_layers": 0},
        ),
        (
            "glm-4.7-flash",
            {"q_lora_rank": 768, "kv_lora_rank": 512, "router_score": "sigmoid", "router_bias": True, "dense_layers": 1,
             "shared_size": 1536, "o_width": 5120},
        ),
        (
            "deepseek-v3-bf16",
            {"expert_groups": 8, "expert_topk_groups": 4, "experts_per_group": 32, "dense_layers": 3, "rope_type": "yarn",
             "quantization": "none"},
        ),
        ("deepseek-v3-fp8", {"quantization": "fp8"}),
        (
            "qwen3-next-80b-a3b",
            {"linear_layers": 36, "full_layers": 12, "attention_gate": True, "rotary_dim": 64, "shared_size": 512,
             "gdn_value_width": 4096, "mrope": False},
        ),
        ("qwen3.5-9b", {"linear_layers": 24, "full_layers": 8, "intermediate_size": 12288, "mrope": True, "rotary_dim": 64}),
        ("qwen3.5-35b-a3b", {"linear_layers": 30, "full_layers": 10, "experts": 256, "kv_heads": 2, "mtp_layers": 1}),
    ],
)  # fmt: skip
def test_a_published_config_gives_its_facts(folder: str, wanted: dict[str, int | str | bool]) -> None:
    found = facts_of(read_config(MODELS / folder))
    assert {name: found[name] for name in wanted} == wanted


def test_a_folder_and_its_file_are_the_same_model() -> None:
    assert read_config(MODELS / "qwen3-8b") == read_config(str(MODELS / "qwen3-8b" / "config.json"))


def test_the_spellings_of_both_transformers_are_one_model() -> None:
    new = {
        name: value
        for name, value in QWEN3.items()
        if name not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}
    new["layer_types"] = ["full_attention"] * 36
    assert facts(new) == facts(QWEN3)


@pytest.mark.parametrize(
    ("rope", "kind"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "default"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "yarn"}}}, "yarn"),
        ({"rope_scaling": {}}, "default"),
    ],
)  # fmt: skip
def test_scaled_positions_are_seen_in_every_form(rope: dict[str, Any], kind: str) -> None:
    assert facts(QWEN3, **rope)["rope_type"] == kind


def test_two_forms_that_disagree_about_the_rope_are_an_error() -> None:
    both = {"rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(ContractError, match=r"rope_parameters.rope_type: wanted yarn"):
        facts(QWEN3, **both)


def test_a_wrapper_speaks_through_its_language_model() -> None:
    inner = facts_of(config_of({**HYBRID["text_config"], "architectures": HYBRID["architectures"]}))
    assert facts(HYBRID) == inner
    assert facts({**HYBRID, "tie_word_embeddings": True})["tied_head"] is True
    assert facts({**HYBRID, "quantization_config": {"quant_method": "fp8"}})["quantization"] == "fp8"
    assert facts({**HYBRID, "quantization_config": {}})["quantization"] == "unknown"


def test_what_a_file_leaves_out_takes_the_default_of_its_architecture() -> None:
    qwen2 = {**QWEN3, "architectures": ["Qwen2ForCausalLM"]}
    assert facts(qwen2, attention_bias=None, head_dim=None) == {**facts(QWEN3), "attention_bias": True}
    assert facts(QWEN3, attention_bias=None)["attention_bias"] is False
    assert facts(MOE, norm_topk_prob=None)["router_normalize"] is False
    assert facts(NEXT, norm_topk_prob=None)["router_normalize"] is True
    assert facts(GLM, first_k_dense_replace=None, topk_method=None)["dense_layers"] == 1
    assert facts(NEXT, partial_rotary_factor=None) == facts(NEXT)
    assert facts(QWEN3, num_key_value_heads=None)["kv_heads"] == 32


def test_layers_without_experts_are_counted_in_every_spelling() -> None:
    assert facts(MOE, decoder_sparse_step=2)["dense_layers"] == 24
    assert facts(MOE, mlp_only_layers=[0, 47])["dense_layers"] == 2
    assert facts(GLM, moe_layer_freq=2)["dense_layers"] == 1 + 23
    assert facts(GLM, mlp_layer_types=["dense"] * 2 + ["sparse"] * 45)["dense_layers"] == 2


def test_a_window_is_one_only_where_it_is_used() -> None:
    assert facts(QWEN3, sliding_window=4096)["sliding_window"] is False
    assert facts(QWEN3, sliding_window=4096, use_sliding_window=True)["sliding_window"] is True
    kinds = ["sliding_attention"] + ["full_attention"] * 35
    assert facts(QWEN3, layer_types=kinds)["sliding_window"] is True


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (QWEN3, {"hidden_size": None}, "hidden_size: wanted an integer of at least 1, found nothing"),
        (QWEN3, {"hidden_size": "4096"}, "hidden_size: wanted an integer of at least 1, found '4096'"),
        (QWEN3, {"num_hidden_layers": True}, "num_hidden_layers: wanted an integer"),
        (QWEN3, {"vocab_size": 0}, "vocab_size: wanted an integer of at least 1, found 0"),
        (QWEN3, {"vocab_size": 10**30}, "vocab_size"),
        (QWEN3, {"num_key_value_heads": 5}, "num_key_value_heads: wanted a divisor of num_attention_heads 32"),
        (QWEN3, {"head_dim": None, "num_attention_heads": 24}, "head_dim: wanted it, since 24 heads do not divide"),
        (QWEN3, {"tie_word_embeddings": "no"}, "tie_word_embeddings: wanted true or false"),
        (QWEN3, {"hidden_act": 3}, "hidden_act: wanted text"),
        (QWEN3, {"quantization_config": "fp8"}, "quantization_config: wanted a mapping"),
        (QWEN3, {"rope_scaling": "yarn"}, "rope_scaling: wanted a mapping"),
        (QWEN3, {"rope_scaling": {"type": 4}}, "rope_scaling.rope_type: wanted the name of a rope"),
        (QWEN3, {"partial_rotary_factor": 2.0}, "partial_rotary_factor: wanted a share of the head"),
        (QWEN3, {"layer_types": ["full_attention"]}, "layer_types: wanted 36 entries, one a layer"),
        (QWEN3, {"layer_types": 3}, "layer_types: wanted a list of names"),
        (QWEN3, {"torch_dtype": 16}, "torch_dtype: wanted the name of a dtype"),
        (MOE, {"num_experts_per_tok": None}, "num_experts_per_tok: wanted an integer"),
        (MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok: wanted at most the 128 experts"),
        (MOE, {"moe_intermediate_size": None}, "moe_intermediate_size: wanted an integer"),
        (MOE, {"mlp_only_layers": [48]}, "mlp_only_layers: wanted a list of layers from 0 to 47"),
        (GLM, {"n_group": 3}, "n_group: wanted a divisor of the 64 experts, found 3"),
        (GLM, {"topk_group": 2}, "topk_group: wanted at most the 1 groups"),
        (GLM, {"v_head_dim": None}, "v_head_dim: wanted an integer"),
        (GLM, {"mlp_layer_types": ["dense"]}, "mlp_layer_types: wanted 47 entries"),
        (NEXT, {"linear_num_value_heads": 24}, "linear_num_value_heads: wanted a multiple of linear_num_key_heads 16"),
        (NEXT, {"layer_types": ["mamba"] * 48}, "layer_types: wanted linear_attention and full_attention, found 'mamba'"),
        (NEXT, {"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim: wanted an integer"),
    ],
)  # fmt: skip
def test_a_field_that_makes_no_sense_is_named(
    config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ContractError) as caught:
        facts(config, **change)
    assert words in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_an_error_in_a_nested_part_names_the_part() -> None:
    broken = {**HYBRID, "text_config": {**HYBRID["text_config"], "num_hidden_layers": "32"}}
    with pytest.raises(ContractError, match=r"text_config\.num_hidden_layers: wanted an integer"):
        facts(broken)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "is not a JSON object"),
        (
            '{"hidden_size": 1}',
            "architectures: wanted a list with the name of the model's class, found missing",
        ),
        ('{"architectures": []}', "architectures"),
        ('{"architectures": [3]}', "architectures"),
        ('{"a": 1, "a": 2}', "a: is given twice"),
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "not JSON"),
    ],
)
def test_a_file_that_is_no_config_says_why(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ContractError) as caught:
        read_config(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_bytes_that_are_no_text_and_files_that_are_not_there_say_so(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ContractError, match="not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * 10_000_001)
    with pytest.raises(ContractError, match="larger than"):
        read_config(tmp_path)


def test_every_fact_says_which_field_it_comes_from() -> None:
    known = {name for path in MODELS.iterdir() if path.is_dir() for name in facts_of(read_config(path))}
    known |= {name for family in FAMILIES for name in family.facts}
    assert known <= set(FIELDS)


def test_an_engines_view_of_the_language_model_gives_the_same_facts() -> None:
    names = ("Qwen3ForCausalLM",)
    assert text_facts({**QWEN3, "architectures": list(names)}, names) == facts(QWEN3)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=8), st.sampled_from([2, 8, 128, "yarn"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "rope_type", "quant_method", "mrope_section"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([QWEN3, MOE, NEXT, HYBRID, GLM]), st.data())
def test_no_value_of_any_field_is_a_crash(config: dict[str, Any], data: st.DataObject) -> None:
    whole = json.loads(json.dumps(config))
    part = whole.get("text_config", whole)
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(VALUES)
    said = "a fact"
    try:
        found = facts_of(config_of(whole))
    except ContractError as error:
        said, found = error.field, {}
    assert said
    assert all(isinstance(value, (int, str)) for value in found.values())
