# SPDX-License-Identifier: Apache-2.0
"""Compares what processes attest with what the contract binds and claims; pure, over the latest attestations.

Only regions under `install` or `install+refuse` are judged: a region that is `off` or `observe` promises
nothing. What could not be read is returned apart, as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoexec.contracts.errors import ContractError, TopologyError
from isoexec.contracts.schema import Contract, RegionBinding
from isoexec.contracts.topology import check_topology
from isoexec.contracts.window import EnvironmentBreak, RegionBreak, TopologyBreak
from isoexec.contracts.wire import Attestation

__all__ = ["Findings", "verify"]

_ENFORCED = ("install", "install+refuse")
_UNPINNED = "sha256:" + "0" * 64


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the attestations break; `unreadable` names roles of which a region or canary could not be read."""

    regions: tuple[RegionBreak, ...] = ()
    topology: tuple[TopologyBreak, ...] = ()
    environment: tuple[EnvironmentBreak, ...] = ()
    unreadable: tuple[str, ...] = ()


def verify(contract: Contract, attestations: Sequence[tuple[str, Attestation]]) -> Findings:
    """Check the latest attestation of each process, given as (replica, attestation)."""
    regions: list[RegionBreak] = []
    unreadable: set[str] = set()
    topology: list[TopologyBreak] = []
    environment: list[EnvironmentBreak] = []
    for _, attestation in attestations:
        topology += _topology(contract, attestation)
        environment += _environment(contract, attestation)
        for name, binding in _bound(contract, attestation.role):
            entry = attestation.regions.get(name)
            if entry is None:
                continue
            if entry.get("enforcement", "install+refuse") in _ENFORCED:
                found, readable = _region(attestation, name, binding, entry)
                regions += found
                if not readable:
                    unreadable.add(attestation.role)
    regions += _absent(contract, attestations)
    regions += _unequal_sides(contract, attestations)
    environment += _unequal_versions(contract, attestations)
    return Findings(
        regions=tuple(regions),
        topology=tuple(topology),
        environment=tuple(environment),
        unreadable=tuple(sorted(unreadable)),
    )


def _bound(contract: Contract, role: str) -> Iterable[tuple[str, RegionBinding]]:
    cases = contract.cases_of(role)
    for name in contract.regions:
        for case in cases:
            try:
                yield name, contract.region(name, case)
            except ContractError:
                continue
            break


def _region(
    attestation: Attestation,
    name: str,
    binding: RegionBinding,
    entry: Mapping[str, Any],
) -> tuple[list[RegionBreak], bool]:
    def broken(kind: Any, wanted: object, found: object) -> RegionBreak:
        return RegionBreak(
            role=attestation.role,
            source=attestation.source,
            region=name,
            wanted=str(wanted),
            found=str(found),
            kind=kind,
        )

    breaks: list[RegionBreak] = []
    canary, expected = entry.get("canary"), entry.get("expected_canary")
    compared = canary is not None and expected is not None
    readable = compared and entry.get("reference_canary") is not None
    if compared and canary != expected:
        breaks.append(broken("canary", expected, canary))
    providers = binding.providers_for(attestation.role)
    admitted = {provider.name for provider in providers}
    provider = entry.get("provider")
    function = entry.get("function")
    if function is not None and function != binding.function:
        breaks.append(broken("object", binding.function, function))
    elif provider is not None and admitted and provider not in admitted:
        breaks.append(broken("object", " or ".join(sorted(admitted)), provider))
    elif entry.get("problem"):
        breaks.append(broken("object", binding.function, entry["problem"]))
    elif compared and not breaks and entry.get("ok") is not True:
        breaks.append(broken("object", binding.function, entry.get("object")))
    sources = {one.source for one in providers if one.source and provider in (None, one.name)}
    sources.discard(_UNPINNED)
    source = entry.get("source")
    if sources and source is None:
        readable = False
    elif sources and source not in sources:
        breaks.append(broken("source", " or ".join(sorted(sources)), source))
    return breaks, readable


def _absent(contract: Contract, attestations: Sequence[tuple[str, Attestation]]) -> Iterable[RegionBreak]:
    """Give the regions that nobody attests who should: with pipeline stages, one rank of a replica is enough."""
    reported: dict[tuple[str, str], set[str]] = {}
    for replica, attestation in attestations:
        reported.setdefault((attestation.role, replica), set()).update(attestation.regions)
    for replica, attestation in attestations:
        staged = attestation.topology.get("PP", 1) > 1
        here = reported[attestation.role, replica] if staged else attestation.regions.keys()
        for name, binding in _bound(contract, attestation.role):
            if name not in here:
                yield RegionBreak(
                    role=attestation.role,
                    source=attestation.source,
                    region=name,
                    wanted=binding.function,
                    found="not attested",
                    kind="missing",
                )


def _unequal_sides(
    contract: Contract, attestations: Sequence[tuple[str, Attestation]]
) -> Iterable[RegionBreak]:
    """The specification gives one answer on every machine of a run: the trainer's first process is what others equal.

    A bound object's own canary has the sizes its layout gives it, so it is compared within its process; the
    reference canary has the function's own sizes everywhere, and ties the machines together.
    """
    first: dict[tuple[str, str], str] = {}
    for _, attestation in sorted(attestations, key=lambda item: item[1].role != "trainer"):
        for name, binding in _bound(contract, attestation.role):
            entry = attestation.regions.get(name, {})
            canary = entry.get("reference_canary")
            if canary is None or entry.get("enforcement", "install+refuse") not in _ENFORCED:
                continue
            function = str(entry.get("function") or binding.function)
            wanted = first.setdefault((name, function), canary)
            if canary != wanted:
                yield RegionBreak(
                    role=attestation.role,
                    source=attestation.source,
                    region=name,
                    wanted=str(wanted),
                    found=str(canary),
                    kind="unequal_sides",
                )


def _topology(contract: Contract, attestation: Attestation) -> list[TopologyBreak]:
    breaks: list[TopologyBreak] = []
    degrees = dict(attestation.topology)
    claims = contract.claims.topology.get(attestation.role, {})
    # the check names one axis at a time: set it right and ask again, at most once an axis
    for _ in range(len(degrees) + len(claims) + 1):
        try:
            check_topology(contract, attestation.role, degrees)
        except TopologyError as error:
            breaks.append(
                TopologyBreak(
                    role=attestation.role,
                    source=attestation.source,
                    axis=error.axis,
                    found=error.found if isinstance(error.found, int) else None,
                    admitted=error.admitted,
                )
            )
            if error.axis in claims and degrees.get(error.axis) not in claims[error.axis].domain:
                degrees[error.axis] = claims[error.axis].domain[0]
            elif error.axis in degrees and error.axis not in claims:
                del degrees[error.axis]
            else:
                break
        else:
            break
    return breaks


def _environment(contract: Contract, attestation: Attestation) -> list[EnvironmentBreak]:
    claim = contract.claims.environment
    wanted: dict[str, tuple[str, ...]] = {"arch": (claim.arch,)}
    wanted |= {name: (value,) for name, value in claim.variables.items()}
    wanted |= {one.name: one.admitted for one in claim.versions}
    wanted |= {name: (str(value),) for name, value in claim.switches.items()}
    breaks: list[EnvironmentBreak] = []
    if attestation.environment.get("problem"):
        # the process compared itself with what it was when the contract was installed
        breaks.append(
            EnvironmentBreak(
                role=attestation.role,
                source=attestation.source,
                name="process",
                wanted="as it was when the contract was installed",
                found=str(attestation.environment["problem"]),
            )
        )
    for name, values in sorted(wanted.items()):
        found = attestation.environment.get(name)
        if found is None or (values and str(found) not in values):
            breaks.append(
                EnvironmentBreak(
                    role=attestation.role,
                    source=attestation.source,
                    name=name,
                    wanted=" or ".join(values) or "any known value",
                    found="unknown" if found is None else str(found),
                )
            )
    return breaks


def _unequal_versions(
    contract: Contract, attestations: Sequence[tuple[str, Attestation]]
) -> Iterable[EnvironmentBreak]:
    """A version that may change bits is one version, in every process."""
    first: dict[str, str] = {}
    for _, attestation in attestations:
        for claim in contract.claims.environment.versions:
            found = attestation.environment.get(claim.name)
            if found is None:
                continue
            wanted = first.setdefault(claim.name, str(found))
            if str(found) != wanted:
                yield EnvironmentBreak(
                    role=attestation.role,
                    source=attestation.source,
                    name=claim.name,
                    wanted=f"{wanted}, as in the other processes",
                    found=str(found),
                )
