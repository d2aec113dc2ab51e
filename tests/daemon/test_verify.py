# SPDX-License-Identifier: Apache-2.0
"""Attestations against the contract: every way in which a process may not run what it promised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.errors import WireError
from isoexec.contracts.schema import Contract, library
from isoexec.contracts.wire import Attestation, Hello
from isoexec.daemon.config import Config
from isoexec.daemon.judge import Judge, rules_for
from isoexec.daemon.runs import Run
from isoexec.daemon.verify import Findings, verify
from isoexec.daemon.window import StepBuilder

CANARY = "sha256:" + "c" * 64


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract.load(library("qwen3-dense-cpu"))


def attestation(contract: Contract, role: str, source: str = "", **changes: Any) -> Attestation:
    claims = contract.claims.topology[role]
    environment: dict[str, Any] = {
        "arch": contract.claims.environment.arch,
        **contract.claims.environment.variables,
    }
    environment |= {one.name: (one.admitted or ("1.0",))[0] for one in contract.claims.environment.versions}
    environment |= dict(contract.claims.environment.switches)
    regions = {}
    for name in contract.regions:
        case = next((case for case in contract.cases_of(role) if _binds(contract, name, case)), None)
        if case is None:
            continue
        provider = contract.region(name, case).providers_for(role)[0]
        regions[name] = {
            "object": "o",
            "provider": provider.name,
            "source": provider.source,
            "canary": CANARY,
            "expected_canary": CANARY,
            "reference_canary": CANARY,
            "enforcement": "install+refuse",
            "ok": True,
        }
    fields: dict[str, Any] = {
        "run": "r",
        "role": role,
        "source": source or f"host:1:{role}0",
        "reason": "start",
        "step": 0,
        "weight_version": 0,
        "topology": {axis: claim.domain[0] for axis, claim in claims.items()},
        "environment": environment,
        "regions": regions,
    }
    return Attestation(**{**fields, **changes})


def _binds(contract: Contract, region: str, case: str) -> bool:
    return any(b.region == region and case in b.cases for b in contract.composition)


def region(one: Attestation, name: str, **changes: Any) -> Attestation:
    regions = {**one.regions, name: {**one.regions[name], **changes}}
    return dataclasses.replace(one, regions=regions)


def found(contract: Contract, *attestations: Attestation) -> Findings:
    return verify(contract, [("", one) for one in attestations])


def test_what_keeps_the_contract_breaks_nothing(contract: Contract) -> None:
    assert found(contract, attestation(contract, "engine"), attestation(contract, "trainer")) == Findings()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda a: region(a, "norm", canary="sha256:other", ok=False), "canary"),
        (lambda a: region(a, "norm", provider="torch.nn.RMSNorm"), "object"),
        (lambda a: region(a, "norm", problem="another callable sits there", ok=False), "object"),
        (lambda a: region(a, "norm", ok=False), "object"),
        (lambda a: region(a, "norm", function="rms_norm.tree/2"), "object"),
        (
            lambda a: dataclasses.replace(a, regions={k: v for k, v in a.regions.items() if k != "norm"}),
            "missing",
        ),
        (lambda a: region(a, "norm", reference_canary="sha256:b"), "unequal_sides"),
    ],
)
def test_a_region_that_is_something_else_is_named(
    contract: Contract, change: Callable[[Attestation], Attestation], kind: str
) -> None:
    seen = found(contract, change(attestation(contract, "engine")), attestation(contract, "trainer"))
    kinds = {one.kind for one in seen.regions}
    assert kind in kinds
    assert {one.region for one in seen.regions} == {"norm"}
    assert {one.role for one in seen.regions} == {"engine"}


def test_a_source_is_compared_once_it_is_pinned(contract: Contract) -> None:
    pinned = contract.to_dict()
    for provider in pinned["providers"]:  # type: ignore[attr-defined]
        provider["source"] = "sha256:" + "1" * 64
    bound = Contract.from_dict(pinned)
    engine = attestation(bound, "engine")
    assert not found(bound, engine).regions
    seen = found(bound, region(engine, "rope", source="sha256:" + "2" * 64))
    assert [(one.region, one.kind) for one in seen.regions] == [("rope", "source")]
    assert found(bound, region(engine, "rope", source=None)).unreadable == ("engine",)


@pytest.mark.parametrize(
    "change",
    [{"canary": None, "ok": False}, {"expected_canary": None, "ok": False}, {"reference_canary": None}],
)
def test_what_cannot_be_read_is_unknown_and_not_a_break(contract: Contract, change: dict[str, Any]) -> None:
    seen = found(contract, region(attestation(contract, "engine"), "rope", **change))
    assert seen.unreadable == ("engine",)
    assert not seen.regions


@pytest.mark.parametrize("enforcement", ["off", "observe"])
def test_regions_that_are_not_enforced_promise_nothing(contract: Contract, enforcement: str) -> None:
    native = region(
        attestation(contract, "engine"), "rope", enforcement=enforcement, canary="sha256:x", ok=False
    )
    assert found(contract, native, attestation(contract, "trainer")) == Findings()


def test_with_pipeline_stages_one_rank_has_a_region_for_its_replica(contract: Contract) -> None:
    topology = {**attestation(contract, "trainer").topology, "PP": 2}
    first = attestation(contract, "trainer", "a", topology=topology)
    last = attestation(contract, "trainer", "b", topology=topology)
    first = dataclasses.replace(first, regions={k: v for k, v in first.regions.items() if k != "lm_head"})
    last = dataclasses.replace(last, regions={k: v for k, v in last.regions.items() if k != "embedding"})
    assert not found(contract, first, last).regions
    assert {one.region for one in found(contract, first).regions} == {"lm_head"}


def test_every_axis_outside_its_claim_is_named(contract: Contract) -> None:
    base = attestation(contract, "engine")
    wrong = dataclasses.replace(base, topology={**base.topology, "TP": 3, "XP": 2})
    breaks = {one.axis: one for one in found(contract, wrong).topology}
    assert breaks["TP"].found == 3
    assert breaks["XP"].found == 2
    lacking = dataclasses.replace(base, topology={k: v for k, v in base.topology.items() if k != "TP"})
    (one,) = found(contract, lacking).topology
    assert (one.axis, one.found) == ("TP", None)


def test_an_environment_that_is_another_or_unknown_is_a_break(contract: Contract) -> None:
    base = attestation(contract, "engine")
    other = dataclasses.replace(base, environment={**base.environment, "arch": "sm_90"})
    assert ("arch", "sm_90") in {(one.name, one.found) for one in found(contract, other).environment}
    silent = dataclasses.replace(base, environment={})
    assert {one.found for one in found(contract, silent).environment} == {"unknown"}


def test_a_switch_that_is_another_is_a_break_naming_switch_wanted_and_found(contract: Contract) -> None:
    base = attestation(contract, "engine")
    other = dataclasses.replace(base, environment={**base.environment, "flush_denormal": True})
    (one,) = found(contract, other, attestation(contract, "trainer")).environment
    assert (one.name, one.role, one.wanted, one.found) == ("flush_denormal", "engine", "False", "True")
    silent = {k: v for k, v in base.environment.items() if k != "float32_matmul_precision"}
    (one,) = found(contract, dataclasses.replace(base, environment=silent)).environment
    assert (one.name, one.wanted, one.found) == ("float32_matmul_precision", "highest", "unknown")


def test_what_a_process_says_is_wrong_with_itself_is_a_break(contract: Contract) -> None:
    base = attestation(contract, "trainer")
    moved = dataclasses.replace(
        base, environment={**base.environment, "problem": "num_threads was 1 and is 4"}
    )
    (one,) = found(contract, moved).environment
    assert (one.name, one.role, one.found) == ("process", "trainer", "num_threads was 1 and is 4")


def test_one_version_for_all_processes(contract: Contract) -> None:
    plain = contract.to_dict()
    plain["claims"]["environment"]["versions"] = [{"name": "torch"}]  # type: ignore[index]
    bound = Contract.from_dict(plain)
    engine = attestation(bound, "engine")
    trainer = dataclasses.replace(
        attestation(bound, "trainer"), environment={**engine.environment, "torch": "2.0"}
    )
    (one,) = found(bound, engine, trainer).environment
    assert (one.name, one.role, one.found) == ("torch", "trainer", "2.0")


def test_every_rank_that_a_driver_speaks_for_is_kept_and_a_missing_one_is_silent(contract: Contract) -> None:
    config = Config(state_dir=Path())
    greeting: dict[str, Any] = {
        "regime": "bitwise",
        "monitor_only": False,
        "contract": contract.to_dict(),
        "identities": contract.identities.to_dict(),
    }
    hellos = [
        Hello(run="r", role=role, source=f"host:1:{role}0", **greeting) for role in ("engine", "trainer")
    ]
    run = Run(
        name="r", config=config, reference=hellos[0], contract=contract, judge=Judge(rules_for("bitwise")), session=1,
        builder=StepBuilder(config, pending_tokens=1),
    )  # fmt: skip
    identities = contract.identities.to_dict()
    for hello in hellos:
        assert run.greet(hello, 0.0).accepted
    run.take(attestation(contract, "trainer", identities=identities), 0.0)
    whole = attestation(contract, "engine", identities=identities)
    regions = dict(whole.regions)
    left_out = regions.popitem()[0]

    def silences() -> set[tuple[str, str]]:
        return {(one.role, one.what) for one in run.window(None, 1.0)[0].silence if one.what == "attestation"}

    run.take(dataclasses.replace(whole, rank=0, world=2, regions=regions), 0.0)
    assert silences() == {("engine", "attestation")}
    run.take(dataclasses.replace(whole, rank=1, world=2), 0.0)
    assert silences() == set()
    for rank in (0, 1):
        source = f"host:2:trainer{rank}"
        assert run.greet(dataclasses.replace(hellos[1], source=source, rank=rank, world=2), 0.0).accepted
        run.take(attestation(contract, "trainer", source, identities=identities, rank=rank, world=2), 0.0)
    run.bye("host:1:trainer0", 0.5)
    run.bye("host:2:trainer0", 0.5)
    assert silences() == set()  # the rank that is left is not alone: the other was there
    assert [(one.region, one.kind) for one in run.window(None, 1.0)[0].region_breaks] == [
        (left_out, "missing")
    ]
    with pytest.raises(WireError, match="rank 2 of 2"):
        run.take(dataclasses.replace(whole, rank=2, world=2), 0.0)
