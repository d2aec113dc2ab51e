# SPDX-License-Identifier: Apache-2.0
"""Say what a process is: its environment, its live topology and what is bound in each region."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from isoexec.contracts import wire
from isoexec.contracts.errors import EvidenceError
from isoexec.kernels import switches
from isoexec.kernels.providers.versions import cublaslt_version
from isoexec.probes.client import Client, installed_versions
from isoexec.probes.contract import ContractNow, contract_now

__all__ = ["arch", "environment", "send_attestation"]


def arch() -> str:
    """`cpu`, or `sm` and the compute capability of this process's GPU, as a contract names an arch."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"sm{''.join(map(str, torch.cuda.get_device_capability()))}"


def environment() -> dict[str, Any]:
    """Versions, machine, switches and variables that can change bits, read from the live process (`isoexec.kernels.switches`)."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "arch": arch(),
        **installed_versions(),
        **_libraries(),
        **switches.environment(),
    }


def _libraries() -> dict[str, str]:
    """Libraries that come beside torch and may be another than it was built with, as those loaded say themselves."""
    if not torch.cuda.is_available():
        return {}
    try:
        return {"cublaslt": cublaslt_version().removeprefix("cublasLt ")}
    except EvidenceError as error:
        return {"cublaslt": f"unknown: {error.found}"}


def send_attestation(
    client: Client,
    *,
    reason: str,
    step: int,
    weight_version: int,
    topology: Mapping[str, int],
    regions: Mapping[str, Mapping[str, Any]],
    environment_found: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world: int | None = None,
    problem: str | None = None,
    contract: ContractNow | None = None,
) -> bool:
    """Queue one attestation; ``regions`` are RegionReport dicts by region name.

    ``contract`` is the one in force (`contract_now`), looked up here where it is not given: where it is not the one of hello it
    is sent along, so that the daemon can name the fields that differ.  ``problem`` is what is wrong with the process itself; it
    travels in the environment, where the daemon looks for it.
    """
    now = contract_now(client.settings) if contract is None else contract
    return client.send(
        wire.Attestation,
        reason=reason,
        step=step,
        weight_version=weight_version,
        identities=now.identities,
        contract=now.changed,
        topology=dict(topology),
        environment={
            **(environment() if environment_found is None else environment_found),
            **({} if problem is None else {"problem": problem}),
        },
        regions={name: dict(region) for name, region in regions.items()},
        rank=client.rank if rank is None else rank,
        world=client.world if world is None else world,
    )
