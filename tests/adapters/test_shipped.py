# SPDX-License-Identifier: Apache-2.0
"""Every shipped contract against this release: its kernels, their constants, and the refusal of what is unproven."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from isoexec.adapters.base import load_adapter, make_plan
from isoexec.adapters.megatron.adapter import SUPPORTED, MegatronAdapter
from isoexec.adapters.megatron.kinds import kinds_of
from isoexec.adapters.vllm.engines import ENGINES
from isoexec.adapters.vllm.install import plan_engine
from isoexec.contracts.errors import InstallError
from isoexec.contracts.models.regions import PROVIDERS
from isoexec.contracts.models.runtimes import RUNTIMES
from isoexec.contracts.parts import AXES
from isoexec.contracts.schema import Contract, library
from isoexec.kernels import registry
from isoexec.kernels.providers.catalogue import provider_for

ONE = dict.fromkeys(AXES, 1)
CONTRACTS = {path.stem: Contract.load(path) for path in sorted(library().glob("*.yaml"))}


def test_the_providers_of_shipped_contracts_are_the_kernels_of_this_release() -> None:
    registered = {
        arch: {
            name: function.kernel(arch).module.removesuffix(".ops")
            for name, function in registry.FUNCTIONS.items()
            if arch in function.arch
        }
        for arch in registry.ARCHS
    }
    own = {a: {f: one.name for f, one in table.items() if not one.version} for a, table in PROVIDERS.items()}
    assert {arch: {f: n for f, n in registered[arch].items() if f in own[arch]} for arch in own} == own
    for arch, names in registered.items():
        bound = {b.function for c in CONTRACTS.values() if c.arch == arch for b in c.composition}
        assert names.keys() & bound == own[arch].keys()


def test_the_libraries_of_shipped_contracts_are_in_the_catalogue_with_their_settings() -> None:
    for arch, table in PROVIDERS.items():
        for function, one in table.items():
            if one.version:
                known = provider_for(one.name, function, arch)
                assert (known.kind, dict(known.settings)) == ("library", dict(one.settings))


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_bound_constants_are_those_the_kernels_compute_with(name: str) -> None:
    contract = CONTRACTS[name]
    checked = 0
    for binding in contract.composition:
        if binding.function in registry.FUNCTIONS:
            registry.check_constants(binding.function, binding.constants)
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("role", ["engine", "trainer"])
@pytest.mark.parametrize("name", [name for name, one in CONTRACTS.items() if one.arch == "sm90"])
def test_a_region_nobody_computes_is_refused_and_not_skipped(
    name: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isoexec.adapters.base.arch", lambda: "sm90")
    contract = CONTRACTS[name]
    with pytest.raises(InstallError) as caught:
        make_plan(contract, role, ONE, "bfloat16")
    error = caught.value
    assert error.region in contract.regions
    assert all((error.wanted, error.found, error.fix))


def test_the_refusal_says_region_wanted_found_and_fix() -> None:
    with pytest.raises(InstallError) as caught:
        make_plan(CONTRACTS["qwen3-dense-sm90"], "engine", ONE, "bfloat16")
    assert str(caught.value).startswith(
        "embedding: wanted a process on sm90, the arch of qwen3-dense-sm90, found cpu; start it where there is such a device"
    )


def test_a_region_switched_off_leaves_the_next_unproven_one_to_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("isoexec.adapters.base.arch", lambda: "sm90")
    contract = CONTRACTS["qwen3.5-dense-sm90"]
    seen: list[str] = []
    for _ in contract.regions:
        monkeypatch.setenv("ISOEXEC_ENFORCE", ",".join(f"{region}=off" for region in seen))
        try:
            make_plan(contract, "engine", ONE, "bfloat16")
        except InstallError as error:
            seen.append(error.region)
        else:
            break
    used = {b.region for b in contract.composition if any(case.startswith("engine") for case in b.cases)}
    unserved = {region for region in used if not contract.region(region).providers_for("engine")}
    assert unserved
    assert unserved <= set(seen)


def unserved(contract: Contract, function: str) -> Contract:
    """The contract without a provider of a function, as if no kernel computed it."""
    left = tuple(one for one in contract.providers if one.function != function)
    return dataclasses.replace(contract, providers=left)


@pytest.mark.vllm
def test_the_vllm_adapter_refuses_an_unproven_region_by_name() -> None:
    contract = unserved(CONTRACTS["qwen3-dense-cpu"], "rope.neox_fp32/1")
    with pytest.raises(
        InstallError, match=r"rope: wanted a provider of rope.neox_fp32/1 that serves the engine on cpu"
    ):
        plan_engine(contract, ONE, "bfloat16")
    with pytest.raises(InstallError, match="engine: wanted an engine of arch sm90"):
        plan_engine(CONTRACTS["qwen3-moe-sm90"], ONE, "bfloat16")


@pytest.mark.megatron
def test_the_megatron_adapter_refuses_an_unproven_region_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=128, num_attention_heads=8, params_dtype=torch.bfloat16
    )
    adapter = MegatronAdapter(groups=ProcessGroupCollection(), config=config)
    contract = unserved(CONTRACTS["qwen3-dense-cpu"], "grad_norm.exact/1")
    with pytest.raises(
        InstallError, match=r"grad_norm: wanted a provider of grad_norm.exact/1 that serves the trainer"
    ):
        adapter.plan(contract)
    monkeypatch.setattr("isoexec.adapters.base.arch", lambda: "sm90")
    contract = unserved(CONTRACTS["qwen3-dense-sm90"], "attention.mma_segments/1")
    with pytest.raises(InstallError, match=r"attention: wanted a provider of attention.mma_segments"):
        adapter.plan(contract)
    with pytest.raises(InstallError, match=r"expert_linear: wanted a contract of dense layers on sm90"):
        adapter.plan(CONTRACTS["glm4-moe-lite-sm90"])


def test_what_is_said_of_runtimes_is_what_their_adapters_support() -> None:
    assert set(RUNTIMES) == {
        point.name for point in importlib.metadata.entry_points(group="isoexec.adapters")
    }
    for name, runtime in RUNTIMES.items():
        assert load_adapter(name).role == runtime.role
    engines = {
        engine.arch: f"{engine.distribution} {'.'.join(map(str, engine.lowest[:2]))}" for engine in ENGINES
    }
    assert engines == RUNTIMES["vllm"].builds
    low, high = SUPPORTED
    text = f"megatron-core {'.'.join(map(str, low))} and later {low[0]}.{low[1]}"
    assert RUNTIMES["megatron"].builds == dict.fromkeys(("cpu", "sm90"), text)
    assert [kinds_of(arch).arch for arch in RUNTIMES["megatron"].builds] == ["cpu", "sm90"]
    assert (high[0], high[1]) == (low[0], low[1] + 1)


def test_shipped_files_are_named_after_their_contracts() -> None:
    assert {name: Path(library(name)).stem for name in CONTRACTS} == {
        name: one.name for name, one in CONTRACTS.items()
    }
