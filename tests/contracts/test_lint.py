# SPDX-License-Identifier: Apache-2.0
"""Each broken contract breaks exactly its rule, a clean one none, and every rule is explained."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import isoexec.contracts.schema as schema
from isoexec.contracts.errors import ContractError
from isoexec.contracts.lint import Finding, all_rules, explain, lint, require_clean, rule, words
from isoexec.contracts.lint.report import rules_page
from isoexec.contracts.operators import OPERATORS
from isoexec.contracts.schema import Contract, library

HERE = Path(__file__).parent
TABLE = runpy.run_path(str(HERE / "broken.py"))
BROKEN, NOW = TABLE["BROKEN"], TABLE["NOW"]
found: Callable[..., list[Finding]] = TABLE["found"]
bench: Callable[..., Any] = TABLE["bench"]


def spoilt(folder: Path, edit: Callable[[Any], object]) -> list[Finding]:
    return found(folder, TABLE["Broken"]("spoilt", "", edit))


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_contract_breaks_exactly_its_rule(broken: Any, tmp_path: Path) -> None:
    findings = found(tmp_path, broken)
    assert {finding.rule for finding in findings} == {broken.rule}
    assert {finding.severity for finding in findings} == {all_rules()[broken.rule].severity}
    for finding in findings:
        assert finding.message
        assert finding.fix
        assert finding.line is not None


def test_the_base_of_the_broken_contracts_has_no_finding(tmp_path: Path) -> None:
    assert found(tmp_path) == []


def test_every_rule_has_a_broken_contract_and_there_are_forty() -> None:
    assert {broken.rule for broken in BROKEN} == set(all_rules())
    assert len({broken.name for broken in BROKEN}) == len(BROKEN) >= 40


@pytest.mark.parametrize("path", sorted(library().glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_contract_lacks_nothing_but_evidence(path: Path) -> None:
    # evidence is judged against the records that lie beside the contracts, in a test of those; a region whose kernel does
    # not exist yet has no provider, and is refused
    found = {finding.rule for finding in lint(Contract.load(path)) if finding.severity != "note"}
    assert found <= {"IX005", "IX009", "IX011", "IX012"}


def test_without_a_store_the_evidence_is_not_judged(tmp_path: Path) -> None:
    made = bench(tmp_path)
    made.name("silu_mul.exp/1", "sha256:" + "a" * 64)
    contract = Contract.from_dict(made.data)
    assert lint(contract) == []
    assert {finding.rule for finding in lint(contract, store=made.store, now=NOW)} == {"IX040"}


def test_a_finding_without_a_file_has_no_line(tmp_path: Path) -> None:
    made = bench(tmp_path)
    del made.claims["topology"]["engine"]["CP"]
    (finding,) = lint(Contract.from_dict(made.data))
    assert (finding.file, finding.line) == ("", None)
    assert str(finding).startswith(
        "IX020 error: claims.topology.engine.CP: the engine claims nothing for CP; "
    )


def test_one_record_discharges_regions_that_are_cut_differently(tmp_path: Path) -> None:
    edit = next(broken.before for broken in BROKEN if broken.name == "regions_cut_differently")
    assert spoilt(tmp_path, edit) == []


@pytest.mark.parametrize("axis", ["TP", "EP", "ETP", "SP", "CP", "PP", "DP"])
@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_every_unclaimed_axis_of_every_role_is_found(role: str, axis: str, tmp_path: Path) -> None:
    findings = spoilt(tmp_path, lambda b: b.claims["topology"][role].pop(axis))
    assert ("IX020", f"claims.topology.{role}.{axis}") in {(one.rule, one.path) for one in findings}


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
def test_k_blocks_that_do_not_divide_a_shard_are_found(
    name: str, constraint: dict[str, int], op: str, tmp_path: Path
) -> None:
    findings = spoilt(tmp_path, lambda b: b.facts.update({name: constraint}))
    assert any(finding.rule == "IX021" and op in finding.message for finding in findings)


def test_widths_follow_from_heads_and_head_dim(tmp_path: Path) -> None:
    def edit(b: Any) -> None:
        del b.facts["q_width"], b.facts["qkv_width"]
        b.facts.update(heads=16, kv_heads=8, head_dim=128)

    assert spoilt(tmp_path, edit) == []


def test_with_latent_attention_the_output_has_a_width_of_its_own(tmp_path: Path) -> None:
    def edit(b: Any) -> None:
        for fact in ("q_width", "kv_heads", "head_dim"):
            del b.facts[fact]
        b.facts.update(kv_lora_rank=512, o_width={"multiple_of": 128})

    assert spoilt(tmp_path, edit) == []

    def narrow(b: Any) -> None:
        edit(b)
        b.facts.update(o_width={"multiple_of": 64})

    (finding,) = found(tmp_path, TABLE["Broken"]("narrow", "", narrow))
    assert "o_proj sums over o_width" in finding.message


def test_a_larger_ep_degree_is_admitted_where_experts_divide(tmp_path: Path) -> None:
    edit = next(broken.before for broken in BROKEN if broken.name == "experts_split")

    def enough(b: Any) -> None:
        edit(b)
        b.facts.update(experts={"multiple_of": 8})

    assert spoilt(tmp_path, enough) == []


def test_the_first_error_refuses_the_contract_and_counts_the_rest(tmp_path: Path) -> None:
    made = bench(tmp_path)
    require_clean(Contract.from_dict(made.data), store=made.store, now=NOW)
    del made.claims["topology"]["engine"]["CP"]
    made.claims["environment"]["arch"] = "sm90"
    with pytest.raises(ContractError, match=r"IX020.*1 more") as caught:
        require_clean(Contract.from_dict(made.data), store=made.store, now=NOW)
    assert caught.value.field == "claims.topology.engine.CP"


def test_a_warning_does_not_refuse_the_contract(tmp_path: Path) -> None:
    made = bench(tmp_path)
    made.claims["environment"]["versions"] = [{"name": "torch"}]
    contract = Contract.from_dict(made.data)
    assert {finding.rule for finding in lint(contract)} == {"IX019"}
    require_clean(contract)


@pytest.mark.parametrize("identifier", sorted(all_rules()))
def test_every_rule_says_what_why_a_breach_and_a_fix(identifier: str) -> None:
    what, why, breach, fix = explain(identifier.lower()).split("\n\n")
    assert what.startswith(f"{identifier} (")
    assert what.endswith(".")
    assert why.startswith("Why: ")
    assert why.endswith(".")
    assert breach.startswith("Breach: ")
    assert fix.startswith("Fix: ")
    assert min(map(len, (what, why, breach, fix))) > 24


def test_explain_without_an_id_lists_every_rule_on_a_line() -> None:
    lines = explain().splitlines()
    assert [line.split()[0] for line in lines] == sorted(all_rules())
    assert all(re.fullmatch(r"IX\d{3}  (error  |warning|note   )  .{20,}", line) for line in lines)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ContractError, match="IX999"):
        explain("IX999")


def test_a_rule_is_registered_once_and_in_full() -> None:
    before = dict(all_rules())
    with pytest.raises(ValueError, match="IX001"):
        words("IX001", "A.\n\nB.\n\nBreach: C.\n\nFix: D.")
    with pytest.raises(ValueError, match="IX998"):

        @rule("IX998")
        def half(contract: Contract) -> Any:
            """A title alone."""
            return iter(())

    assert dict(all_rules()) == before


def test_the_committed_rules_page_is_the_generated_one() -> None:
    page = Path(schema.__file__).parent / "spec" / "lint.md"
    command = "isoexec contract explain --format markdown > contracts/spec/lint.md"
    assert page.read_text(encoding="utf-8") == rules_page(), f"run: {command}"


def test_torchs_version_says_the_version_of_what_comes_with_it(tmp_path: Path) -> None:
    assert spoilt(tmp_path, lambda b: b.provider("linear.library/1").update(name="cublaslt")) == []
    findings = spoilt(tmp_path, lambda b: b.provider("linear.library/1").update(name="mkl.linear"))
    assert [finding.message for finding in findings] == ["claims.environment.versions does not name mkl"]


def test_kv_heads_may_be_held_by_several_ranks_whole(tmp_path: Path) -> None:
    assert spoilt(tmp_path, lambda b: b.facts.update(kv_heads={"one_of": [1, 2, 4]})) == []


def test_the_operators_of_shipped_contracts_with_k_blocks_are_known() -> None:
    # an operator that is not in the table would slip past IX021
    blocked = {
        op
        for path in library().glob("*.yaml")
        for binding in Contract.load(path).composition
        if {"k_block", "step"} & set(binding.constants)
        for op in binding.ops
    }
    assert blocked <= set(OPERATORS)
