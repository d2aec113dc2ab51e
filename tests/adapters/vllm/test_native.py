# SPDX-License-Identifier: Apache-2.0
"""Without a contract the engine is only watched: its logprobs are recorded, its weights reloaded, and nothing is claimed."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.vllm

PACKED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def found(native: dict[str, Any]) -> dict[str, Any]:
    return native["bfloat16"]


def test_a_monitored_engine_is_recorded(found: dict[str, Any]) -> None:
    assert sum(map(len, found["decode"])) == 64 * 16


def test_no_region_of_a_native_engine_is_reported_as_the_contracts(found: dict[str, Any]) -> None:
    (report,) = found["reports"]
    assert not any(r["ok"] for r in report["regions"].values())
    assert all(r["enforcement"] == "off" for r in report["regions"].values())
    assert report["regions"]["norm"]["object"] == "vllm.model_executor.layers.layernorm.RMSNorm"


def test_weights_packed_where_nobody_can_read_them_are_named_unknown(found: dict[str, Any]) -> None:
    assert {name.split(".")[-2] for name in found["unknown"]} == set(PACKED)
    assert not set(found["unknown"]) & set(found["readable"])
    assert len(found["unknown"]) + len(found["readable"]) == 3 * 11 + 3


def test_a_reload_gives_the_bits_of_an_engine_started_from_the_new_checkpoint(found: dict[str, Any]) -> None:
    assert found["synced"] != found["decode"]
    assert found["synced"] == found["fresh"]
