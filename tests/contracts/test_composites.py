# SPDX-License-Identifier: Apache-2.0
"""A fused function and the functions it is made of are the same schedule to a contract, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.composites import COMPOSITES, apart
from isoexec.contracts.discharge import refusals
from isoexec.contracts.evidence import Check, Control, EvidenceRecord, Store, Subject, stamp
from isoexec.contracts.lint import lint
from isoexec.contracts.lint.tables import FUNCTIONS
from isoexec.contracts.operators import OPERATORS
from isoexec.contracts.parts import Discharge
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_fused_entry_takes_from_outside_what_its_first_part_takes(dtype: str, tmp_path: Path) -> None:
    """Logits in float32 are made inside it: its evidence is of the dtypes of hidden states and of the head."""
    contract, now = Contract.load(library("qwen3-dense-sm90")), 1_900_000_000.0
    (entry,) = (b for b in contract.composition if b.region == "head_logprobs")
    (provider,) = (p for p in contract.providers if p.function == entry.function)
    check = Check(
        family="rerun_determinism",
        constants=entry.constants,
        domain={"dtype": (dtype,)},
        elements=1,
        differing=0,
        controls=(Control(name="a_fault", elements=1, differing=1),),
    )
    record = EvidenceRecord(
        schema_version=1,
        function=entry.function,
        provider=Subject(name=provider.name, kind="kernel", source=provider.source),
        arch="sm90",
        environment={"torch": "any"},
        profile="full",
        gate=provider.source or "",
        made=stamp(now - 1),
        expires=stamp(now + 1),
        checks=(check,),
    )
    store = Store([tmp_path])
    store.write(record)
    found = Discharge(kind="evidence", evidence=record.digest)
    proven = replace(
        contract,
        composition=tuple(replace(b, discharge=found) if b is entry else b for b in contract.composition),
    )
    said = [one for one in refusals(proven, store, now=now) if one.regions == ("head_logprobs",)]
    dtypes = [(one.wanted, one.found) for one in said if one.rule == "IX046"]
    assert dtypes == ([] if dtype == "bfloat16" else [("bfloat16 covered", "float32")])


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
