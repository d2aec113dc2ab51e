# SPDX-License-Identifier: Apache-2.0
"""Each lint rule finds the breach it is for, and nothing in a clean contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.digests import ZERO
from isoexec.contracts.errors import ContractError
from isoexec.contracts.lint import RULES, Finding, explain, lint, require_clean
from isoexec.contracts.schema import Contract, library

SHIPPED = Contract.load(library("qwen3-dense-cpu"))
lint(SHIPPED)  # the rules register on first use
Data = dict[str, Any]
Edit = Callable[[Data], object]
EVIDENCE = "sha256:" + "e" * 64


def region(data: Data, name: str) -> Data:
    return next(entry for entry in data["composition"] if entry["region"] == name)


def provider(data: Data, function: str) -> Data:
    return next(entry for entry in data["providers"] if entry["function"] == function)


def case(data: Data, name: str) -> Data:
    return next(entry for entry in data["cases"] if entry["name"] == name)


def tolerance(**changes: object) -> Data:
    made = {"cases": ["engine_decode", "trainer_fwd"], "metric": "max_abs_d", "bound": "1e-3",
            "regions": ["attention"], "reason": "another segment"}  # fmt: skip
    return {**made, **changes}


def two_functions(data: Data) -> None:
    """The trainer computes the activation by another function than the engine."""
    engine = region(data, "silu_mul")
    trainer = {
        **engine,
        "function": "silu_mul.native/1",
        "cases": [c for c in engine["cases"] if c[0] == "t"],
    }
    engine["cases"] = [c for c in engine["cases"] if c[0] == "e"]
    data["composition"].append(trainer)
    data["providers"].append({**provider(data, "silu_mul.exp/1"), "function": "silu_mul.native/1"})


def as_library(data: Data) -> None:
    found = provider(data, "silu_mul.exp/1")
    found.update(kind="library", version="1.0")
    del found["source"]


BREACHES: dict[str, tuple[Edit, str]] = {
    "IX001": (lambda d: region(d, "norm")["ops"].remove("final_norm"), "final_norm"),
    "IX002": (lambda d: region(d, "rope")["ops"].append("embed"), "embedding, rope"),
    "IX003": (lambda d: d["claims"].update(bitwise=[], tolerances=[tolerance(regions=["attn"])]), "attn"),
    "IX004": (lambda d: region(d, "rope")["cases"].append("engine_verify"), "engine_verify"),
    "IX005": (lambda d: provider(d, "rope.neox_fp32/1").update(roles=["trainer"]), "serves the engine"),
    "IX006": (lambda d: d["providers"].append({**provider(d, "rope.neox_fp32/1"), "function": "rope.gptj/1"}), "gptj"),
    "IX007": (lambda d: region(d, "rope")["ops"].append("router"), "router"),
    "IX008": (two_functions, "silu_mul.native/1"),
    "IX009": (lambda d: provider(d, "rope.neox_fp32/1").update(discharge={"kind": "none"}), "unknown"),
    "IX010": (as_library, "a library"),
    "IX011": (lambda d: region(d, "norm").update(route="reference_preserving"), "reference_preserving"),
    "IX012": (lambda d: provider(d, "rope.neox_fp32/1").update(source=ZERO), "all-zero"),
    "IX020": (lambda d: d["claims"]["topology"]["engine"].pop("CP"), "nothing for CP"),
    "IX021": (lambda d: d["claims"]["topology"]["trainer"].update(TP={"invariant": [1, 2, 4]}), "need a multiple of 256"),
    "IX022": (lambda d: region(d, "logprobs")["constants"].update(vocab_leaves=1), "TP 2"),
    "IX023": (lambda d: d.update(deployment={"kv_page_size": 48}), "48 tokens"),
    "IX024": (lambda d: d["model"]["facts"].update(kv_heads={"minimum": 1}), "kv_heads"),
    "IX025": (lambda d: d["claims"]["topology"]["trainer"].update(SP={"invariant": [1, 4]}), "SP 4"),
    "IX026": (lambda d: case(d, "engine_decode").update(domain={"length": {"maximum": 8193}}), "8193"),
    "IX030": (lambda d: d["claims"].update(tolerances=[tolerance()]), "claimed bitwise"),
    "IX031": (lambda d: d["claims"].update(bitwise=[], tolerances=[tolerance(regions=[])]), "blames no region"),
    "IX032": (lambda d: d["claims"]["bitwise"][0].remove("trainer_score"), "trainer_score"),
    "IX033": (lambda d: d["claims"]["environment"].update(arch="sm90"), "sm90"),
    "IX034": (lambda d: d["claims"].update(state=[{"state": "kv_cache", "invalidated_by": ["weight_sync"]}]), "prefix"),
}  # fmt: skip


def pinned() -> Data:
    """The shipped contract with every source pinned: a contract without findings."""
    data: Data = SHIPPED.to_dict()
    for entry in data["providers"]:
        entry["source"] = "sha256:" + "1" * 64
    return data


def findings(edit: Edit) -> list[Finding]:
    data = pinned()
    edit(data)
    return lint(Contract.from_dict(data))


def test_a_pinned_contract_has_no_finding() -> None:
    assert lint(Contract.from_dict(pinned())) == []


def test_the_shipped_contract_has_no_error() -> None:
    require_clean(SHIPPED)
    assert {finding.rule for finding in lint(SHIPPED)} <= {"IX012"}


def test_the_golden_contract_has_no_error() -> None:
    require_clean(Contract.load(Path(__file__).parent / "vectors" / "contract.yaml"))


def test_every_rule_has_a_breach_here() -> None:
    assert sorted(BREACHES) == sorted(RULES)


@pytest.mark.parametrize("identifier", BREACHES)
def test_a_breach_is_found_by_its_rule(identifier: str) -> None:
    edit, words = BREACHES[identifier]
    found = [finding for finding in findings(edit) if finding.rule == identifier]
    assert any(words in f"{finding.path} {finding.message}" for finding in found), found
    assert all(finding.fix and finding.path for finding in found)
    assert {finding.severity for finding in found} == {RULES[identifier].severity}


@pytest.mark.parametrize("axis", ["TP", "EP", "ETP", "SP", "CP", "PP", "DP"])
@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_every_unclaimed_axis_of_every_role_is_found(role: str, axis: str) -> None:
    found = findings(lambda data: data["claims"]["topology"][role].pop(axis))
    assert ("IX020", f"claims.topology.{role}.{axis}") in {(finding.rule, finding.path) for finding in found}


def test_different_functions_are_admitted_with_evidence_on_both() -> None:
    def edit(data: Data) -> None:
        two_functions(data)
        for entry in data["composition"]:
            if entry["region"] == "silu_mul":
                entry["discharge"] = {"kind": "evidence", "evidence": EVIDENCE}

    assert not [finding for finding in findings(edit) if finding.rule == "IX008"]


def test_one_function_with_two_constants_is_not_one_schedule() -> None:
    def edit(data: Data) -> None:
        engine = region(data, "attention")
        trainer = {**engine, "cases": ["trainer_fwd"], "constants": {"kv_segment": 64, "query_tile": 16}}
        engine["cases"] = [name for name in engine["cases"] if name != "trainer_fwd"]
        data["composition"].append(trainer)

    assert "IX008" in {finding.rule for finding in findings(edit)}


@pytest.mark.parametrize(
    ("name", "constraint", "op"),
    [
        ("hidden_size", {"multiple_of": 32}, "gate_up_proj"),
        ("intermediate_size", {"multiple_of": 64}, "down_proj"),
        ("q_width", {"multiple_of": 64}, "o_proj"),
        ("vocab_size", {"multiple_of": 64}, "lm_head"),
        ("vocab_size", {"fixed": 151937}, "lm_head"),
    ],
)
def test_k_blocks_that_do_not_divide_a_shard_are_found(name: str, constraint: Data, op: str) -> None:
    found = findings(lambda data: data["model"]["facts"].update({name: constraint}))
    assert any(finding.rule == "IX021" and op in finding.message for finding in found)


def test_widths_follow_from_heads_and_head_dim() -> None:
    def edit(data: Data) -> None:
        facts = data["model"]["facts"]
        for width in ("q_width", "qkv_width"):
            del facts[width]
        facts.update(heads={"fixed": 16}, kv_heads={"fixed": 8}, head_dim={"fixed": 128})

    assert findings(edit) == []


def test_the_first_error_refuses_the_contract_and_counts_the_rest() -> None:
    data = pinned()
    BREACHES["IX020"][0](data)
    BREACHES["IX033"][0](data)
    with pytest.raises(ContractError, match=r"IX020.*1 more") as caught:
        require_clean(Contract.from_dict(data))
    assert caught.value.field == "claims.topology.engine.CP"


@pytest.mark.parametrize("identifier", BREACHES)
def test_every_rule_is_explained(identifier: str) -> None:
    text = explain(identifier.lower())
    assert text.startswith(identifier)
    assert len(text.splitlines()[2]) > 40


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ContractError, match="IX999"):
        explain("IX999")
