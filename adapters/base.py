# SPDX-License-Identifier: Apache-2.0
"""What every adapter does: describe a runtime, plan, install, verify what is really there, remove, take a census.

An adapter is found by entry point (group ``isoexec.adapters``), ours and others' by the same door.  ``verify`` never trusts a
name or a flag: it runs the registry's canary through the bound object and digests what comes out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, cast, runtime_checkable

import torch

from isoexec.adapters.census import Census
from isoexec.adapters.proof import require_evidence
from isoexec.contracts.errors import InstallError
from isoexec.contracts.routes import ROUTE_RULES, on_failure
from isoexec.contracts.schema import Contract
from isoexec.contracts.topology import check_topology
from isoexec.kernels import registry
from isoexec.probes.attest import arch
from isoexec.probes.client import contract_from_env

__all__ = [
    "REGIONS",
    "STEP_REGIONS",
    "Adapter",
    "Binding",
    "Census",
    "Enforcement",
    "Plan",
    "RegionReport",
    "Report",
    "RuntimeDescription",
    "contract_from_env",
    "enforcement_from_env",
    "expected_canary",
    "load_adapter",
    "make_plan",
    "reference_canary",
    "regions_of",
]

REGIONS: tuple[str, ...] = (
    "embedding",
    "norm",
    "qk_norm",
    "column_linear",
    "qkv_bias",
    "row_linear",
    "rope",
    "attention",
    "router",
    "routing",
    "dispatch",
    "expert_linear",
    "silu_mul",
    "combine",
    "lm_head",
    "logprobs",
    "head_logprobs",
)
"""The regions of a forward that adapters know, in order; a contract holds those its model has (`regions_of`)."""

STEP_REGIONS: tuple[str, ...] = ("grad_norm",)
"""The regions of a training step outside its forward."""


class Enforcement(StrEnum):
    """How far an adapter goes in a region."""

    OFF = "off"
    OBSERVE = "observe"
    INSTALL = "install"
    INSTALL_REFUSE = "install+refuse"

    @property
    def installs(self) -> bool:
        return self in (Enforcement.INSTALL, Enforcement.INSTALL_REFUSE)

    @property
    def refuses(self) -> bool:
        return self is Enforcement.INSTALL_REFUSE


@dataclass(frozen=True, kw_only=True)
class RuntimeDescription:
    """A runtime as found: ``topology`` maps an axis to its live degree, ``modules`` a region to the objects that serve it."""

    runtime: str
    role: str
    versions: Mapping[str, str]
    topology: Mapping[str, int]
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One region of one runtime and the function it is to compute."""

    region: str
    function: str
    provider: str
    source: str
    constants: Mapping[str, Any]
    enforcement: Enforcement


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What ``install`` will do in this process."""

    role: str
    contract: Contract
    topology: Mapping[str, int]
    bindings: tuple[Binding, ...]

    def binding(self, region: str) -> Binding | None:
        """The binding of a region, or None where enforcement is off."""
        return next((b for b in self.bindings if b.region == region), None)

    def installs(self, region: str) -> bool:
        binding = self.binding(region)
        return binding is not None and binding.enforcement.installs

    def constant(self, region: str, name: str) -> Any:
        """A contract constant of a region; InstallError when the contract does not hold it."""
        binding = self.binding(region)
        if binding is None or name not in binding.constants:
            found = sorted(binding.constants) if binding else "no binding"
            raise InstallError(
                region=region,
                wanted=f"constant {name!r}",
                found=str(found),
                fix="add it to the contract's composition",
            )
        return binding.constants[name]


@dataclass(frozen=True, kw_only=True)
class RegionReport:
    """What is bound in a region now.

    ``canary`` is the digest of the bound object's output on the registry's canary input at the sizes its layout gives it,
    ``expected_canary`` the specification's; ``reference_canary`` is the specification's at the function's own sizes, which
    every process of a run must share: it ties their machines together.
    """

    region: str
    object: str
    provider: str
    source: str
    canary: str | None
    expected_canary: str | None
    enforcement: Enforcement
    reference_canary: str | None = None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None and self.canary is not None and self.canary == self.expected_canary

    def to_dict(self) -> dict[str, Any]:
        return {
            "object": self.object,
            "provider": self.provider,
            "source": self.source,
            "canary": self.canary,
            "expected_canary": self.expected_canary,
            "reference_canary": self.reference_canary,
            "enforcement": str(self.enforcement),
            "problem": self.problem,
            "ok": self.ok,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """The live state of one process of a runtime.

    ``problem`` is one of the process as a whole, such as a moved layout; ``changed``, what of its code, switches and variables is
    not as it was when the plan was installed, or not as the contract claims.  ``environment`` is the one that was looked at.
    """

    role: str
    rank: int
    world: int
    topology: Mapping[str, int]
    regions: tuple[RegionReport, ...]
    problem: str | None = None
    changed: str | None = None
    environment: Mapping[str, Any] | None = None

    def problems(self) -> tuple[str, ...]:
        """One line per region that is not what the contract says; regions only observed or off are not judged."""
        own = tuple(filter(None, (self.problem, self.changed)))
        return own + tuple(
            f"{r.region}: {r.problem or f'canary {r.canary} is not {r.expected_canary}'} (bound: {r.object})"
            for r in self.regions
            if r.enforcement.installs and not r.ok
        )

    def require(self) -> None:
        """Raise InstallError naming what is wrong with the process, or the first region that does not hold and must refuse."""
        own = "; ".join(filter(None, (self.problem, self.changed)))
        if own and any(r.enforcement.refuses for r in self.regions):
            raise InstallError(
                region=self.role,
                wanted="the process, in the layout and state that the plan was installed in",
                found=own,
                fix="start again, and plan for what is wanted",
            )
        for r in self.regions:
            if r.enforcement.refuses and not r.ok:
                raise InstallError(
                    region=r.region,
                    wanted=f"{r.provider} with canary {r.expected_canary}",
                    found=f"{r.object} with canary {r.canary}" + (f": {r.problem}" if r.problem else ""),
                    fix="install the adapter in this process, or lower the region's enforcement",
                )


@runtime_checkable
class Adapter(Protocol):
    """One runtime's adapter."""

    role: str

    def describe(self) -> RuntimeDescription: ...

    def plan(self, contract: Contract) -> Plan: ...

    def install(self, plan: Plan) -> None: ...

    def verify(self) -> Sequence[Report]: ...

    def remove(self) -> None: ...

    def census(self) -> Census: ...


def regions_of(contract: Contract, role: str) -> tuple[str, ...]:
    """The regions ``contract`` gives ``role``: those adapters know in their order, then whatever else it names."""
    cases = set(contract.cases_of(role))
    named = {binding.region for binding in contract.composition if cases & set(binding.cases)}
    known = (*REGIONS, *STEP_REGIONS)
    return (*(r for r in known if r in named), *sorted(named - set(known)))


def enforcement_from_env(text: str | None = None, *, more: Iterable[str] = ()) -> dict[str, Enforcement]:
    """Region -> enforcement from ``ISOEXEC_ENFORCE`` (``mode`` or ``region=mode,...``); ``install+refuse`` where unsaid.

    ``more`` are regions beside those adapters know: a contract's own.
    """
    raw = os.environ.get("ISOEXEC_ENFORCE", "") if text is None else text
    modes = dict.fromkeys((*REGIONS, *STEP_REGIONS, *more), Enforcement.INSTALL_REFUSE)
    for part in filter(None, (p.strip() for p in raw.split(","))):
        region, _, mode = part.rpartition("=")
        if mode not in list(Enforcement) or (region and region not in modes):
            raise InstallError(
                region=region or "ISOEXEC_ENFORCE",
                wanted=f"mode ({', '.join(Enforcement)}) or region=mode, regions {', '.join(modes)}",
                found=part,
                fix="correct ISOEXEC_ENFORCE",
            )
        for name in [region] if region else list(modes):
            modes[name] = Enforcement(mode)
    return modes


def make_plan(
    contract: Contract, role: str, topology: Mapping[str, int] | None, dtype: str | None = None
) -> Plan:
    """Bind every region the contract gives ``role`` to the kernel in this installation.

    ``topology`` is the degree of every axis; None where the process has no groups yet, and whoever calls judges the
    degrees (``check_topology``) once it has.  Raises TopologyError for a degree the contract does not admit, and
    InstallError when a region is one that adapters do not know (it would run as the runtime likes), when its kernel is of
    another source than the admitted provider, when its evidence is missing, edited, expired or of something else than
    this process, or when the model dtype is not admitted.
    """
    if topology is not None:
        check_topology(contract, role, topology)
    admitted = contract.claims.dtypes
    if dtype is not None and dtype not in admitted:
        raise InstallError(
            region="model",
            wanted=f"dtype in {list(admitted)}",
            found=dtype,
            fix="load the model in an admitted dtype",
        )
    modes = enforcement_from_env(more=contract.regions)
    asked = regions_of(contract, role)
    if install := [name for name in asked if modes[name].installs]:
        _require_arch(contract, install[0])
    bindings = []
    for name in asked:
        mode = modes[name]
        _require_route(contract, name, mode)
        if mode is Enforcement.OFF:
            continue
        if name not in (*REGIONS, *STEP_REGIONS):
            raise InstallError(
                region=name,
                wanted=f"a region this release installs: {', '.join((*REGIONS, *STEP_REGIONS))}",
                found=f"region {name} in {contract.name}",
                fix=f"use a release that knows it, or say ISOEXEC_ENFORCE={name}=off to run it natively",
            )
        region = contract.region(name)
        if not region.providers_for(role):
            raise InstallError(
                region=name,
                wanted=f"a provider of {region.function} that serves the {role} on {contract.arch}",
                found=f"none in {contract.name}: the region is unproven",
                fix=f"say ISOEXEC_ENFORCE={name}=off to run it natively and watch it; isoexec contract show "
                f"{contract.name} lists what else is unproven",
            )
        registry.check_constants(region.function, region.constants)
        provider = region.provider(role)
        if provider.kind == "library":
            raise InstallError(
                region=name,
                wanted=f"{provider.name}, {provider.version}, as {contract.name} admits it",
                found="adapters that bind own kernels only",
                fix=f"admit an own kernel of {region.function}, or say ISOEXEC_ENFORCE={name}=off to run it natively",
            )
        found = registry.source_digest(region.function, contract.arch)
        if mode.installs and provider.source != found:
            raise InstallError(
                region=name,
                wanted=f"{provider.name} of source {provider.source}",
                found=f"{region.function} of source {found}",
                fix="use the release the contract was pinned for, or run its gate anew (isoexec gate run --pin FILE)",
            )
        bindings.append(
            Binding(
                region=name,
                function=region.function,
                provider=provider.name,
                source=found,
                constants=dict(region.constants),
                enforcement=mode,
            )
        )
    require_evidence(contract, [b for b in bindings if b.enforcement.installs])
    return Plan(role=role, contract=contract, topology=dict(topology or {}), bindings=tuple(bindings))


def _require_arch(contract: Contract, region: str) -> None:
    here = arch()
    if contract.arch != here:
        raise InstallError(
            region=region,
            wanted=f"a process on {contract.arch}, the arch of {contract.name}",
            found=here,
            fix=f"start it where there is such a device, or take a contract of {here} (isoexec contract for MODEL_DIR)",
        )


def _require_route(contract: Contract, name: str, mode: Enforcement) -> None:
    for route in sorted({one.route for one in contract.composition if one.region == name}):
        if on_failure(route, mode) == "no_plan":
            raise InstallError(
                region=name,
                wanted=f"enforcement of at least {ROUTE_RULES[route].least}, for its route is {route}",
                found=str(mode),
                fix="raise it in ISOEXEC_ENFORCE; a protected region is not lowered",
            )


def reference_canary(binding: Binding, dtype: torch.dtype) -> str:
    """Digest of the specification's answer on this machine to the function's canary at its own sizes."""
    return expected_canary(binding.function, binding.constants, dtype)


def expected_canary(
    function: str, constants: Mapping[str, Any], dtype: torch.dtype, sizes: Mapping[str, int] | None = None
) -> str:
    """Digest of the specification's answer at these sizes, worked out once a process.

    What a switch changes later shows in the bound object's answer, and not in this one as well.
    """
    return _expected(function, tuple(sorted(constants.items())), dtype, tuple(sorted((sizes or {}).items())))


@cache
def _expected(
    function: str,
    constants: tuple[tuple[str, Any], ...],
    dtype: torch.dtype,
    sizes: tuple[tuple[str, int], ...],
) -> str:
    return registry.expected_digest(function, dict(constants), dtype=dtype, sizes=dict(sizes))


def load_adapter(name: str) -> type[Adapter]:
    """The adapter class registered under ``name`` in the entry-point group ``isoexec.adapters``."""
    known = {e.name: e for e in entry_points(group="isoexec.adapters")}
    if name not in known:
        raise InstallError(
            region="adapter",
            wanted=name,
            found=f"adapters {sorted(known)}",
            fix="install the package that registers it",
        )
    return cast(type[Adapter], known[name].load())
