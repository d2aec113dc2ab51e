# SPDX-License-Identifier: Apache-2.0
"""Planning refuses what is not proven, in words, and a report says what does not hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from isoexec.adapters.base import (
    REGIONS,
    STEP_REGIONS,
    Enforcement,
    RegionReport,
    Report,
    enforcement_from_env,
    load_adapter,
    make_plan,
    reference_canary,
    regions_of,
)
from isoexec.contracts.errors import InstallError, TopologyError
from isoexec.contracts.parts import ROUTES
from isoexec.contracts.routes import ENFORCEMENTS, on_failure
from isoexec.contracts.schema import Contract, library
from isoexec.kernels.domain import DomainError

DEGREES = {"TP": 2, "SP": 1, "PP": 1, "CP": 1, "EP": 1, "ETP": 1, "DP": 1}


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract.load(library("qwen3-dense-cpu"))


def test_the_shipped_contract_is_pinned_to_the_kernels_of_this_release(contract: Contract) -> None:
    # after a change of a kernel: make pin
    engine = make_plan(contract, "engine", DEGREES, "bfloat16")
    trainer = make_plan(contract, "trainer", DEGREES, "float32")
    elsewhere = {"qkv_bias", "router", "routing", "dispatch", "expert_linear", "combine", "head_logprobs"}
    forward = [r for r in REGIONS if r not in elsewhere]  # a dense Qwen3 has neither a bias nor experts
    assert [b.region for b in engine.bindings] == forward
    assert [b.region for b in trainer.bindings] == [*forward, *STEP_REGIONS]


def test_a_contracts_own_regions_are_planned_and_no_others() -> None:
    mimo = Contract.load(library("mimo-dense-cpu"))
    engine = make_plan(mimo, "engine", DEGREES)
    assert engine.binding("qkv_bias") is not None
    assert engine.binding("qk_norm") is None
    assert set(regions_of(mimo, "trainer")) - set(regions_of(mimo, "engine")) == set(STEP_REGIONS)


def test_a_region_no_adapter_knows_is_refused_by_name_unless_it_is_off(
    contract: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = tuple(
        dataclasses.replace(b, region="attention_gate") if b.region == "rope" else b
        for b in contract.composition
    )
    other = dataclasses.replace(contract, composition=gated)
    with pytest.raises(
        InstallError, match=r"attention_gate: wanted a region this release installs: .*rope.*"
    ):
        make_plan(other, "engine", DEGREES)
    monkeypatch.setenv("ISOEXEC_ENFORCE", "attention_gate=off")
    plan = make_plan(other, "engine", DEGREES)
    assert plan.binding("attention_gate") is None
    assert plan.binding("rope") is None


@pytest.mark.parametrize(
    ("role", "change", "words"),
    [
        ("engine", {"TP": 3}, r"engine TP is 3, the contract admits invariant over \{1, 2\}"),
        ("trainer", {"CP": 2}, "trainer CP is 2, the contract admits pinned 1"),
        ("trainer", {"SP": 3}, "SP"),
    ],
)
def test_an_unproven_degree_is_refused_with_axis_found_and_admitted(
    contract: Contract, role: str, change: dict[str, int], words: str
) -> None:
    with pytest.raises(TopologyError, match=words):
        make_plan(contract, role, {**DEGREES, **change})


def test_an_axis_nobody_read_is_unknown_and_refused(contract: Contract) -> None:
    with pytest.raises(TopologyError, match="CP is unknown"):
        make_plan(contract, "engine", {a: d for a, d in DEGREES.items() if a != "CP"})


def test_a_kernel_of_another_source_is_refused(contract: Contract) -> None:
    other = tuple(
        dataclasses.replace(p, source="sha256:" + "1" * 64) if p.function == "linear.chain/1" else p
        for p in contract.providers
    )
    with pytest.raises(
        InstallError, match=r"column_linear: wanted isoexec.kernels.linear of source sha256:1111"
    ):
        make_plan(dataclasses.replace(contract, providers=other), "engine", DEGREES)


def test_constants_the_kernel_does_not_compute_with_are_refused(contract: Contract) -> None:
    other = tuple(
        dataclasses.replace(b, constants={**b.constants, "row_tile": 8}) if b.region == "lm_head" else b
        for b in contract.composition
    )
    with pytest.raises(DomainError, match="row_tile 8"):
        make_plan(dataclasses.replace(contract, composition=other), "engine", DEGREES)


def routed(contract: Contract, region: str, route: str) -> Contract:
    changed = (
        dataclasses.replace(one, route=route) if one.region == region else one for one in contract.composition
    )
    return dataclasses.replace(contract, composition=tuple(changed))


@pytest.mark.parametrize("mode", ENFORCEMENTS)
@pytest.mark.parametrize("route", ROUTES)
def test_a_failed_region_ends_as_its_route_says(
    contract: Contract, monkeypatch: pytest.MonkeyPatch, route: str, mode: str
) -> None:
    monkeypatch.setenv("ISOEXEC_ENFORCE", f"rope={mode}")
    changed = routed(contract, "rope", route)
    other = tuple(
        dataclasses.replace(one, source="sha256:" + "1" * 64) if one.function == "rope.neox_fp32/1" else one
        for one in contract.providers
    )
    outcome = on_failure(route, mode)
    if outcome == "no_plan":
        with pytest.raises(InstallError, match=r"rope: wanted enforcement of at least install\+refuse"):
            make_plan(changed, "engine", DEGREES)
        return
    binding = make_plan(changed, "engine", DEGREES).binding("rope")
    # unbound: the admitted source is not here
    unbound = dataclasses.replace(changed, providers=other)
    if outcome in ("violation", "refused"):
        with pytest.raises(InstallError, match=r"rope: wanted isoexec\.kernels\.rope of source sha256:1111"):
            make_plan(unbound, "engine", DEGREES)
    else:
        make_plan(unbound, "engine", DEGREES)
    # broken: what is there answers with other bits
    if outcome == "unseen":
        assert binding is None
        return
    assert binding is not None
    region = RegionReport(
        region="rope", object="native", provider="p", source="s", canary="sha256:1", expected_canary="sha256:2",
        enforcement=binding.enforcement,
    )  # fmt: skip
    report = Report(role="engine", rank=0, world=1, topology=DEGREES, regions=(region,))
    assert bool(report.problems()) == (outcome in ("violation", "refused"))
    if outcome == "refused":
        with pytest.raises(InstallError, match="rope: wanted"):
            report.require()
    else:
        report.require()


def test_a_dtype_outside_the_claim_is_refused(contract: Contract) -> None:
    with pytest.raises(InstallError, match="float16"):
        make_plan(contract, "engine", DEGREES, "float16")


def test_enforcement_goes_region_by_region_and_bad_words_name_the_variable() -> None:
    modes = enforcement_from_env("observe,attention=install+refuse,rope=off")
    assert modes["norm"] is Enforcement.OBSERVE
    assert modes["attention"].refuses
    assert modes["rope"] is Enforcement.OFF
    assert set(enforcement_from_env("").values()) == {Enforcement.INSTALL_REFUSE}
    for text in ("strict", "atention=off", "norm="):
        with pytest.raises(InstallError, match="ISOEXEC_ENFORCE"):
            enforcement_from_env(text)


def test_regions_that_are_off_are_not_planned(contract: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOEXEC_ENFORCE", "rope=off,norm=observe")
    plan = make_plan(contract, "engine", DEGREES)
    assert plan.binding("rope") is None
    assert not plan.installs("norm")
    assert plan.installs("attention")
    with pytest.raises(InstallError, match="rope: wanted constant 'length', found no binding"):
        plan.constant("rope", "length")


def region(**change: Any) -> RegionReport:
    values: dict[str, Any] = {
        "region": "norm",
        "object": "Norm",
        "provider": "p",
        "source": "s",
        "canary": "a",
        "expected_canary": "a",
        "enforcement": Enforcement.INSTALL_REFUSE,
    }
    return RegionReport(**{**values, **change})


def report(*regions: RegionReport, problem: str | None = None) -> Report:
    return Report(role="engine", rank=0, world=1, topology=DEGREES, regions=regions, problem=problem)


def test_a_report_passes_only_with_the_expected_canary_in_hand() -> None:
    report(region()).require()
    for broken in (
        region(canary="b"),
        region(canary=None),
        region(expected_canary=None),
        region(problem="gone"),
    ):
        assert not broken.ok
        with pytest.raises(InstallError, match="norm"):
            report(region(), broken).require()
        assert len(report(region(), broken).problems()) == 1


def test_what_is_only_observed_is_told_and_not_refused() -> None:
    seen = report(
        region(canary="b", enforcement=Enforcement.OBSERVE),
        region(canary="b", enforcement=Enforcement.INSTALL),
    )
    seen.require()
    assert len(seen.problems()) == 1


def test_a_process_that_moved_does_not_hold_though_its_regions_do() -> None:
    moved = report(region(), problem="layer 0 is on TP 1")
    assert moved.problems() == ("layer 0 is on TP 1",)
    with pytest.raises(InstallError, match="layer 0 is on TP 1"):
        moved.require()


def test_a_process_that_changed_does_not_hold_though_its_regions_do() -> None:
    found = dataclasses.replace(report(region()), changed="num_threads was 1 and is 2")
    assert found.problems() == ("num_threads was 1 and is 2",)
    with pytest.raises(InstallError, match="num_threads was 1 and is 2"):
        found.require()
    dataclasses.replace(report(region(enforcement=Enforcement.INSTALL)), changed="x").require()


def test_the_reference_canary_depends_on_function_constants_and_dtype_alone(contract: Contract) -> None:
    engine, trainer = (make_plan(contract, role, DEGREES) for role in ("engine", "trainer"))
    for name in regions_of(contract, "engine"):
        a, b = engine.binding(name), trainer.binding(name)
        assert a is not None
        assert b is not None
        assert reference_canary(a, torch.bfloat16) == reference_canary(b, torch.bfloat16)
    norm = engine.binding("norm")
    assert norm is not None
    assert reference_canary(norm, torch.float32) != reference_canary(norm, torch.bfloat16)


def test_adapters_come_in_by_one_door() -> None:
    assert load_adapter("vllm").__name__ == "VllmAdapter"
    with pytest.raises(InstallError, match=r"adapters \['megatron', 'vllm'\]"):
        load_adapter("sglang")
