# SPDX-License-Identifier: Apache-2.0
"""Say what a process is: its environment, its live topology and what is bound in each region."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from isoexec.contracts import wire
from isoexec.probes.client import Client, identities, installed_versions

__all__ = ["environment", "send_attestation"]

_VARIABLES = (
    "OMP_NUM_THREADS",
    "VLLM_BATCH_INVARIANT",
    "NCCL_ALGO",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCHDYNAMO_DISABLE",
)


def environment() -> dict[str, Any]:
    """Versions, build and switches that can change bits, read from the live process."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        **installed_versions(),
    }
    found["arch"] = (
        f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}" if torch.cuda.is_available() else "cpu"
    )
    found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    found["threads"] = torch.get_num_threads()
    found["deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
    found["blas_library"] = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]
    found["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    found.update({name: os.environ[name] for name in _VARIABLES if name in os.environ})
    return found


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
) -> bool:
    """Queue one attestation; ``regions`` are RegionReport dicts by region name."""
    return client.send(
        wire.Attestation,
        reason=reason,
        step=step,
        weight_version=weight_version,
        identities=identities(client.settings.contract),
        topology=dict(topology),
        environment=dict(environment() if environment_found is None else environment_found),
        regions={name: dict(region) for name, region in regions.items()},
        rank=client.rank if rank is None else rank,
        world=client.world if world is None else world,
    )
