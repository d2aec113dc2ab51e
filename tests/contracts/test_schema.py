# SPDX-License-Identifier: Apache-2.0
"""Looking things up in a contract: regions, providers, cases, models and environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.errors import ContractError
from isoexec.contracts.loading import parse
from isoexec.contracts.parts import Constraint
from isoexec.contracts.schema import Contract, library

SHIPPED = Contract.load(library("qwen3-dense-cpu"))
GOLDEN = Contract.load(Path(__file__).parent / "vectors" / "contract.yaml")
QWEN3_0_6B: dict[str, int | str | bool] = {
    "hidden_size": 1024, "intermediate_size": 3072, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "activation": "silu", "attention_bias": False, "sliding_window": False, "quantization": "none",
    "rope_type": "default", "partial_rotary": False,
}  # fmt: skip


def test_the_shipped_contract_binds_every_region_to_its_function() -> None:
    assert {name: SHIPPED.region(name).function for name in SHIPPED.regions} == {
        "attention": "attention.segments/1",
        "column_linear": "linear.chain/1",
        "embedding": "embedding.lookup/1",
        "grad_norm": "grad_norm.exact/1",
        "lm_head": "linear.chain/1",
        "logprobs": "logprobs.leaves/1",
        "norm": "rms_norm.tree/1",
        "qk_norm": "rms_norm.tree/1",
        "rope": "rope.neox_fp32/1",
        "row_linear": "linear.chain/1",
        "silu_mul": "silu_mul.exp/1",
    }


def test_a_region_has_constants_and_a_provider_a_role() -> None:
    head = SHIPPED.region("lm_head")
    assert head.constants == {"k_block": 64, "row_tile": 16, "accumulate": "float32", "boundary": "float32"}
    assert head.provider("engine").name == "isoexec.kernels.linear"
    assert SHIPPED.region("attention").constants == {"kv_segment": 32, "query_tile": 16}


def test_engine_and_trainer_may_bind_different_providers() -> None:
    row = GOLDEN.region("row_linear")
    assert (row.provider("engine").name, row.provider("trainer").name) == ("cublaslt", "own.linear")


def test_a_role_without_a_provider_is_refused() -> None:
    with pytest.raises(ContractError, match=r"0 providers of grad_norm\.exact/1 serve the engine"):
        SHIPPED.region("grad_norm").provider("engine")


def test_an_unknown_region_or_case_is_refused() -> None:
    with pytest.raises(ContractError, match="no region 'mlp'"):
        SHIPPED.region("mlp")
    with pytest.raises(ContractError, match="in case engine_decode"):
        SHIPPED.region("grad_norm", "engine_decode")
    with pytest.raises(ContractError, match="no case 'trainer_eval'"):
        SHIPPED.case("trainer_eval")


def test_a_region_bound_by_case_needs_the_case() -> None:
    data: dict[str, Any] = SHIPPED.to_dict()
    engine = next(entry for entry in data["composition"] if entry["region"] == "attention")
    data["composition"].append({**engine, "cases": ["trainer_fwd"], "constants": {"kv_segment": 64}})
    engine["cases"].remove("trainer_fwd")
    contract = Contract.from_dict(data)
    with pytest.raises(ContractError, match="name the case"):
        contract.region("attention")
    assert contract.region("attention", "trainer_fwd").constants == {"kv_segment": 64}


def test_claims_of_topology_are_read_by_role_and_axis() -> None:
    claims = SHIPPED.claims.topology
    assert claims["trainer"]["PP"].domain == (1, 2, 4, 8)
    assert claims["engine"]["PP"].pinned == 1
    assert SHIPPED.cases_of("engine") == ("engine_decode", "engine_prefill")


def test_the_contract_serves_published_qwen3_shapes() -> None:
    assert SHIPPED.model.refusals(QWEN3_0_6B) == []
    assert (
        SHIPPED.model.refusals({**QWEN3_0_6B, "hidden_size": 5120, "heads": 64, "intermediate_size": 25600})
        == []
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"hidden_size": 1000}, "hidden_size is 1000, the contract wants a multiple of 64"),
        ({"heads": 3, "kv_heads": 2}, "heads is 3"),
        ({"heads": 2, "head_dim": 32, "kv_heads": 2}, "q_width is 64"),
        ({"layers": True}, "layers is True"),
    ],
)
def test_another_shape_is_refused_by_name(facts: dict[str, int], words: str) -> None:
    assert any(words in line for line in SHIPPED.model.refusals({**QWEN3_0_6B, **facts}))


def test_a_fact_that_is_not_told_is_unknown() -> None:
    facts = {name: value for name, value in QWEN3_0_6B.items() if name != "layers"}
    assert SHIPPED.model.refusals(facts) == ["layers is unknown, the contract wants at least 1"]


def test_an_environment_is_judged_by_what_it_tells() -> None:
    environment = GOLDEN.claims.environment
    good = {"arch": "cpu", "OMP_NUM_THREADS": "1", "torch": "2.13.0", "triton": "3.4"}
    assert environment.refusals(good) == []
    assert environment.refusals({**good, "torch": "2.14"}) == [
        "torch is 2.14, the contract wants 2.13.0 or 2.13.1"
    ]
    assert environment.refusals({**good, "triton": None}) == [
        "triton is unknown, the contract wants any value"
    ]


@pytest.mark.parametrize(
    ("constraint", "yes", "no"),
    [
        (Constraint(fixed=4), [4], [5, "4", True]),
        (Constraint(one_of=("a", 1)), ["a", 1], [True, "b"]),
        (Constraint(multiple_of=8, minimum=8, maximum=16), [8, 16], [0, 12, 24, "8"]),
        (Constraint(), [1, "x", False], []),
    ],
)
def test_a_constraint_admits(
    constraint: Constraint, yes: list[int | str | bool], no: list[int | str | bool]
) -> None:
    assert all(constraint.admits(value) for value in yes)
    assert not any(constraint.admits(value) for value in no)


def test_an_unknown_shipped_contract_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match="qwen3-dense-cpu"):
        library("qwen4")


def test_a_fact_without_a_value_is_not_a_fact_that_may_be_anything() -> None:
    text = (
        library("qwen3-dense-cpu").read_text().replace("head_dim: {multiple_of: 2, minimum: 2}", "head_dim:")
    )
    with pytest.raises(ContractError, match="has no value") as caught:
        Contract.from_document(parse(text))
    assert caught.value.field == "model.facts.head_dim"
    assert caught.value.line == 1 + text[: text.index("head_dim:")].count("\n")
    assert (
        Contract.from_document(parse(text.replace("head_dim:", "head_dim: {}")))
        .model.facts["head_dim"]
        .admits(7)
    )
