# SPDX-License-Identifier: Apache-2.0
"""A fused function and the functions it is made of are the same schedule to a contract, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from isoexec.contracts.composites import COMPOSITES, apart
from isoexec.contracts.lint import lint
from isoexec.contracts.lint.tables import FUNCTIONS
from isoexec.contracts.operators import OPERATORS
from isoexec.contracts.schema import Contract, library

NAME = "qwen3-dense-sm90"
SM90 = sorted(path.stem for path in library().glob("*-sm90.yaml"))
Data = dict[str, Any]


def findings(edit: Callable[[dict[str, Data]], object]) -> dict[str, list[str]]:
    """What the rules on parity say of the contract with its entries edited, by rule."""
    data: Data = copy.deepcopy(Contract.load(library(NAME)).to_dict())
    edit({one["region"]: one for one in data["composition"]})
    out: dict[str, list[str]] = {}
    for one in lint(Contract.from_dict(data)):
        if one.rule in ("IX008", "IX010", "IX069"):
            out.setdefault(one.rule, []).append(one.message)
    return out


@pytest.mark.parametrize("name", SM90)
def test_the_trainer_has_the_engine_s_bits_without_its_logits(name: str) -> None:
    contract = Contract.load(library(name))
    fused = contract.region("head_logprobs")
    assert (fused.function, fused.ops) == ("linear_logprobs.mma_blocks/1", ("lm_head", "token_logprob"))
    assert set(fused.cases) == set(contract.cases_of("trainer"))
    assert {one.name for one in fused.providers} == {"isoexec.kernels.linear_logprobs.hopper"}
    entries = {b.region: b for b in contract.composition}
    parts = {part.ops: part for part in apart(entries["head_logprobs"])}
    for region in ("lm_head", "logprobs"):
        alone = entries[region]
        assert set(alone.cases) == set(contract.cases_of("engine"))
        part = parts[alone.ops]
        assert (part.function, dict(part.constants)) == (alone.function, dict(alone.constants))
    assert any({*fused.cases, "engine_decode"} <= set(group) for group in contract.claims.bitwise)
    assert not {one.rule for one in lint(contract)} & {"IX008", "IX010", "IX069"}


def test_every_constant_of_a_fused_function_goes_to_a_part_and_makes_it_whole() -> None:
    for name, stages in COMPOSITES.items():
        taken = [one for stage in stages for one in stage.constants]
        assert sorted(taken) == sorted(FUNCTIONS[name].constants)
        for stage in stages:
            assert {*stage.constants, *stage.own} == set(FUNCTIONS[stage.function].constants)
            assert stage.op in OPERATORS


def test_what_fuses_nothing_stands_for_itself() -> None:
    for binding in Contract.load(library(NAME)).composition:
        if binding.function not in COMPOSITES:
            assert apart(binding) == (binding,)


@pytest.mark.parametrize(
    ("region", "constant", "value", "op"),
    [
        ("head_logprobs", "vocab_leaves", 16, "token_logprob"),
        ("head_logprobs", "step", 32, "lm_head"),
        ("logprobs", "block", 64, "token_logprob"),
        ("lm_head", "boundary", "model", "lm_head"),  # logits rounded to bf16 are other logits
    ],
)
def test_another_constant_on_either_side_is_another_schedule(
    region: str, constant: str, value: Any, op: str
) -> None:
    found = findings(lambda entries: entries[region]["constants"].update({constant: value}))
    assert set(found) == {"IX008"}
    assert all(f"compute {op} by different functions or constants" in said for said in found["IX008"])


def test_another_function_beside_a_fused_one_is_found() -> None:
    found = findings(lambda entries: entries["logprobs"].update(function="logprobs.leaves/1"))
    assert set(found) == {"IX008"}


@pytest.mark.parametrize("ops", [["token_logprob"], ["lm_head"], ["lm_head", "token_logprob", "final_norm"]])
def test_a_fused_entry_that_owns_other_operators_is_no_composition(ops: list[str]) -> None:
    found = findings(lambda entries: entries["head_logprobs"].update(ops=ops))
    assert "IX069" in found
    assert "IX008" in found, "it no longer counts as its parts"


def test_other_entries_are_still_to_be_cut_alike() -> None:
    def edit(entries: dict[str, Data]) -> None:
        norm = entries["norm"]
        norm["discharge"] = {"kind": "none"}  # one record of both would show that they are alike
        other = copy.deepcopy(norm)
        norm["cases"] = [case for case in norm["cases"] if case.startswith("engine")]
        other.update(region="norm_trainer", cases=[c for c in other["cases"] if c.startswith("trainer")])
        entries["rope"].update(other)  # in the place of an entry, which is not asked about here

    assert "IX010" in findings(edit)
