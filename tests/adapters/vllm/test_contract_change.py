# SPDX-License-Identifier: Apache-2.0
"""At a weight sync the real engine is held to the contract it greeted with: what changed is named by its fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

FIELD = "composition[attention].constants.kv_segment"


@pytest.fixture(scope="module")
def found(run: Callable[..., dict[str, Any]], models: dict[str, str], pinned: str) -> dict[str, Any]:
    return run("edited", contract=pinned, first=models["first"])


def test_a_contract_that_stands_is_attested_and_not_sent_again(found: dict[str, Any]) -> None:
    assert found["stands"]["said"] == "agreed"
    assert found["stands"]["contract"] is None
    assert set(found["stands"]["identities"]) == {"semantic", "numerical_policy", "deployment"}


def test_a_file_edited_between_two_syncs_is_refused_by_its_fields_and_attested(found: dict[str, Any]) -> None:
    said = found["file"]["said"]
    assert said.startswith("HandshakeError: ")
    assert "edited.yaml was edited since this process greeted the daemon: 1 field differs" in said
    assert f"{FIELD}: the file has 64, the hello has 32" in said
    assert found["file"]["identities"]["numerical_policy"] == found["policy"]
    assert found["file"]["contract"]["name"] == "qwen3-dense-cpu"


def test_a_worker_with_another_contract_than_the_driver_is_refused_by_its_fields(
    found: dict[str, Any],
) -> None:
    assert found["worker"]["said"].startswith("InstallError: embedding: wanted")
    assert "the worker's contract is not the driver's, 1 field differs: " in found["worker"]["said"]
    assert f"{FIELD}: the worker has 32, the driver has 64" in found["worker"]["said"]


def test_a_contract_that_cannot_be_read_any_more_is_unknown_and_refused(found: dict[str, Any]) -> None:
    assert found["gone"]["said"].startswith("ContractError: ")
    assert "edited.yaml: cannot be read: No such file or directory" in found["gone"]["said"]
    assert (found["gone"]["identities"], found["gone"]["contract"]) == (None, None)
