# SPDX-License-Identifier: Apache-2.0
"""Who may join a run, and who may stay: the answer is always the list of fields that differ."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from isoexec.contracts.identities import identities_of
from isoexec.contracts.schema import Contract, library
from isoexec.contracts.wire import Attestation, Hello
from isoexec.daemon.handshake import agree, agree_still

CONTRACT = Contract.load(library("qwen3-dense-cpu")).to_dict()
SAME: Any = object()


def another(segment: int = 64) -> dict[str, Any]:
    data: dict[str, Any] = copy.deepcopy(CONTRACT)
    for binding in data["composition"]:
        if binding["region"] == "attention":
            binding["constants"]["kv_segment"] = segment
    return data


def hello(role: str, contract: Any = CONTRACT, source: str = "", **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "run": "r", "role": role, "source": source or f"host:1:{role}0", "regime": "bitwise",
        "monitor_only": contract is None, "contract": contract,
        "identities": identities_of(contract).to_dict() if contract is not None else None,
    }  # fmt: skip
    return Hello(**{**fields, **changes})


def attestation(contract: Any = CONTRACT, sent: Any = None, identities: Any = SAME) -> Attestation:
    named = identities_of(contract).to_dict() if contract is not None else None
    return Attestation(
        run="r", role="engine", source="host:1:engine0", reason="sync", step=3, weight_version=3, topology={},
        identities=named if identities is SAME else identities, contract=sent,
    )  # fmt: skip


def test_processes_of_one_contract_agree_and_deployments_may_differ() -> None:
    assert agree(hello("trainer"), hello("engine")).accepted
    assert agree(hello("trainer"), hello("engine", {**CONTRACT, "deployment": {"kv_page_size": 32}})).accepted


def test_a_refusal_names_every_field_and_both_values() -> None:
    found = agree(hello("trainer"), hello("engine", {**another(), "arch": "sm90"}))
    assert not found.accepted
    assert found.differences == (
        ("arch", "sm90", "cpu"),
        ("composition[attention].constants.kv_segment", 64, 32),
    )
    assert "2 fields differ: arch: engine has sm90, trainer has cpu; composition[attention]" in found.message
    assert [(one.path, one.engine, one.trainer) for one in found.fields] == list(found.differences)


def test_a_field_that_one_side_lacks_is_none_there() -> None:
    data = another(32)
    del data["claims"]["topology"]["engine"]["CP"]
    found = agree(hello("trainer"), hello("engine", data))
    assert found.differences == (("claims.topology.engine.CP", None, {"pinned": 1}),)


def test_two_of_one_role_are_told_apart_by_source() -> None:
    found = agree(hello("engine"), hello("engine", another(), source="other:2:engine1"))
    assert "kv_segment: other:2:engine1 has 64, host:1:engine0 has 32" in found.message
    assert found.fields[0].path.endswith("(other:2:engine1 / host:1:engine0)")


def test_a_contract_on_one_side_only_is_named() -> None:
    found = agree(hello("trainer"), hello("engine", None))
    assert found.differences[0][:2] == ("contract", None)
    assert "qwen3-dense-cpu, numerical_policy sha256:" in found.message
    assert "contract: engine has (absent), trainer has qwen3-dense-cpu" in found.message


def test_another_regime_is_a_difference_too() -> None:
    found = agree(hello("trainer"), hello("engine", regime="bf16_dense"))
    assert found.differences == (("regime", "bf16_dense", "bitwise"),)


def test_a_driver_is_not_compared() -> None:
    assert agree(hello("trainer"), hello("driver", another())).accepted


@pytest.mark.parametrize(
    ("greeted", "attested"),
    [(hello("engine"), attestation()), (hello("engine", None), attestation(None)),
     (hello("engine"), attestation(sent=CONTRACT))],
)  # fmt: skip
def test_what_is_as_it_was_has_no_difference(greeted: Hello, attested: Attestation) -> None:
    assert agree_still(greeted, attested) == ()


def test_a_contract_that_changed_since_the_hello_is_named_by_its_fields() -> None:
    (row,) = agree_still(hello("engine"), attestation(another(), sent=another()))
    assert row.path == "composition[attention].constants.kv_segment (host:1:engine0, attested / at hello)"
    assert (row.engine, row.trainer) == (64, 32)


def test_a_deployment_that_changed_is_no_difference() -> None:
    moved = {**CONTRACT, "deployment": {"kv_page_size": 32}}
    assert agree_still(hello("engine"), attestation(moved, sent=moved)) == ()


@pytest.mark.parametrize(
    ("attested", "engine"),
    [
        (attestation(another()), identities_of(another()).numerical_policy),  # the contract was not sent
        (attestation(another(), sent=another(16)), identities_of(another()).numerical_policy),
        (attestation(sent=another()), identities_of(CONTRACT).numerical_policy),
        (attestation(sent={"claims": 0.5}), identities_of(CONTRACT).numerical_policy),
        (attestation(identities=None), None),  # the process could not read its contract
        (attestation(identities={}), None),
    ],
    ids=["not sent", "another sent", "the named one not sent", "no canonical form", "unreadable", "empty"],
)  # fmt: skip
def test_what_cannot_be_named_by_field_still_differs(attested: Attestation, engine: str | None) -> None:
    rows = {row.path.split(" ")[0]: row for row in agree_still(hello("engine"), attested)}
    assert rows["identities.numerical_policy"].engine == engine
    assert rows["identities.numerical_policy"].trainer != engine


def test_a_process_that_gains_a_contract_is_seen() -> None:
    (row,) = agree_still(hello("engine", None), attestation(sent=CONTRACT))
    assert row.path.startswith("contract (")
    assert (row.trainer, "qwen3-dense-cpu" in str(row.engine)) == (None, True)
