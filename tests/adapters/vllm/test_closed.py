# SPDX-License-Identifier: Apache-2.0
"""Whatever gets lost between the contract and the engine, no token is sampled: the engine or the report refuses, in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path on which the plugin called isoexec has a module that does not import."""
    root = tmp_path_factory.mktemp("broken")
    (root / "isoexec_broken.py").write_text("raise ImportError('a library is missing')\n")
    info = root / "isoexec-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: isoexec\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nisoexec = isoexec_broken:register\n")
    return root


@pytest.fixture(scope="module")
def said(run: Run, models: dict[str, str], pinned: str, broken: Path) -> dict[str, Any]:
    return run("closed", contract=pinned, first=models["first"], broken=str(broken))


@pytest.mark.parametrize("case", ["no_plugin", "broken_plugin", "off", "unset"])
def test_without_the_plugin_the_engine_refuses_the_quantization_it_does_not_know(
    said: dict[str, Any], case: str
) -> None:
    assert said[case] != "sampled"
    assert "isoexec" in said[case]
    assert "uantization" in said[case]


def test_a_hook_that_is_gone_is_found_from_inside_the_worker(said: dict[str, Any]) -> None:
    assert said["half"].startswith("InstallError: norm: wanted")
    assert "vllm.model_executor.layers.layernorm.RMSNorm" in said["half"]


def test_an_engine_started_natively_does_not_pass_for_a_contracts(said: dict[str, Any]) -> None:
    assert said["no_quantization_no_worker"].startswith("InstallError: embedding: wanted")
    assert (
        "the worker's contract is not the driver's, 1 field differs: contract: "
        in said["no_quantization_no_worker"]
    )
    assert "the worker has (absent), the driver has qwen3-dense-cpu" in said["no_quantization_no_worker"]


def test_an_engine_that_cannot_report_does_not_pass(said: dict[str, Any]) -> None:
    assert said["bare"].startswith("InstallError: engine: wanted workers that report what they bind")


def test_compilation_is_refused(said: dict[str, Any]) -> None:
    assert "enforce_eager=True" in said["compiled"]


def test_a_worker_with_another_contract_than_the_driver_is_refused(said: dict[str, Any]) -> None:
    assert (
        "engine: wanted the driver's contract in this worker, found 1 field differs: "
        in said["other_contract"]
    )
    assert (
        "composition[attention].constants.kv_segment: the driver has 64, this worker has 32"
        in said["other_contract"]
    )


def test_positions_past_the_rotary_table_are_refused(said: dict[str, Any]) -> None:
    assert "rope: wanted positions below the table's length 8192" in said["too_long"]


def test_an_adapter_without_an_engine_does_not_verify(said: dict[str, Any]) -> None:
    assert said["no_engine"].startswith("InstallError: engine: wanted a running engine")


def test_a_region_that_is_only_observed_is_compared_and_not_judged(
    run: Run, models: dict[str, str], pinned: str
) -> None:
    found = run("partial", contract=pinned, first=models["first"])
    regions = found["report"]["regions"]
    assert found["sampled"] == 2 * 16
    assert found["report"]["problems"] == []
    assert regions["norm"]["enforcement"] == "observe"
    assert not regions["norm"]["ok"]
    assert regions["norm"]["canary"] != regions["norm"]["expected_canary"]
    assert regions["rope"]["enforcement"] == "off"
    assert regions["rope"]["object"].startswith("vllm.model_executor.layers.rotary_embedding")
    others = set(regions) - {"norm", "rope"}
    assert all(regions[name]["ok"] for name in others)


def test_hooks_installed_twice_are_there_once_and_can_be_taken_back(run: Run, pinned: str) -> None:
    found = run("removed", contract=pinned)
    assert all(name.startswith("isoexec.") for name in found["there"].values())
    assert not any(name.startswith("isoexec.") for name in found["before"].values())
    assert found["after"] == found["before"]
