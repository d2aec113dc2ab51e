# SPDX-License-Identifier: Apache-2.0
"""One process of the engine has one contract; a second one is refused by the fields in which it differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from isoexec.adapters.base import Plan
from isoexec.adapters.vllm import state
from isoexec.contracts.errors import InstallError
from isoexec.contracts.schema import Contract, library


@pytest.fixture
def plan() -> Iterator[Plan]:
    """A plan that is active."""
    made = Plan(role="engine", contract=Contract.load(library("qwen3-dense-cpu")), topology={}, bindings=())
    state.activate(made)
    yield made
    state.deactivate()


def test_the_same_contract_may_be_activated_again(plan: Plan) -> None:
    again = dataclasses.replace(
        plan, contract=dataclasses.replace(plan.contract, deployment_section={"numa": 1})
    )
    state.activate(again)
    assert state.active() is again


def test_another_contract_is_refused_by_its_fields(plan: Plan) -> None:
    other = dataclasses.replace(plan, contract=dataclasses.replace(plan.contract, arch="sm90"))
    with pytest.raises(
        InstallError, match="1 field differs: arch: what is installed has cpu, what is asked for has sm90"
    ):
        state.activate(other)
    assert state.active() is plan
