# SPDX-License-Identifier: Apache-2.0
"""Installs a contract into the current process of the engine, through vLLM's own extension points only."""

from __future__ import annotations

from collections.abc import Mapping

from isoexec.adapters.base import Plan, contract_from_env, make_plan
from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.engines import require_engine
from isoexec.contracts.errors import InstallError
from isoexec.contracts.schema import Contract
from isoexec.kernels import registry

__all__ = ["ROLE", "install_from_env", "install_plan", "plan_engine", "remove_plan"]

ROLE = "engine"


def plan_engine(contract: Contract, topology: Mapping[str, int] | None, dtype: str | None = None) -> Plan:
    """`make_plan` for the engine of this environment; refuses an engine build or arch the contract does not speak of.

    ``topology`` is None where no degree is known yet.
    """
    engine, found = require_engine()
    if contract.arch != engine.arch:
        raise InstallError(
            region="engine",
            wanted=f"an engine of arch {contract.arch}",
            found=f"{engine.distribution} {found}, arch {engine.arch}",
            fix="choose a contract of this arch",
        )
    plan = make_plan(contract, ROLE, topology, dtype)
    for binding in plan.bindings:
        registry.check_constants(binding.function, binding.constants)
    return plan


def install_plan(plan: Plan) -> None:
    """Register the hooks of every region ``plan`` installs; idempotent.  A plan that only observes registers nothing."""
    engine, _ = require_engine()
    state.activate(plan)
    if any(b.enforcement.installs for b in plan.bindings):
        engine.load().install(plan)


def install_from_env() -> None:
    """Install the contract of ``ISOEXEC_CONTRACT``; the degrees are judged by the driver and again by each worker."""
    contract = contract_from_env()
    if contract is None or state.active() is not None:
        return
    plan = plan_engine(contract, None)
    if any(b.enforcement.installs for b in plan.bindings):
        install_plan(plan)


def remove_plan() -> None:
    """Take every hook of ours out of vLLM's registries; engines that were built with them keep theirs."""
    engine, _ = require_engine()
    engine.load().remove()
    state.deactivate()
