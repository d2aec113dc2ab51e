# SPDX-License-Identifier: Apache-2.0
"""Refuses a parallel layout that the contract does not claim for a role, naming axis, degree and domain."""

from __future__ import annotations

from collections.abc import Mapping

from isoexec.contracts.errors import TopologyError
from isoexec.contracts.parts import AXES, ROLES
from isoexec.contracts.schema import Contract

__all__ = ["check_topology"]


def check_topology(contract: Contract, role: str, degrees: Mapping[str, int]) -> None:
    """Return when every degree is claimed for the role; raises TopologyError for the first that is not.

    `degrees` is {axis: degree}, with SP 1 for off and the TP degree for on. An axis that the contract does
    not claim is refused whatever its degree; a claimed axis that is missing is unknown, and refused too.
    """
    claims = contract.claims.topology.get(role)
    if role not in ROLES or claims is None:
        roles = ", ".join(sorted(contract.claims.topology)) or "no role"
        raise TopologyError("role", role, f"claims for {roles}", role)
    order = [*AXES, *sorted(set(degrees) - set(AXES))]
    for axis in (axis for axis in order if axis in degrees or axis in claims):
        if axis not in claims:
            raise TopologyError(axis, degrees[axis], "no degree: the axis is not claimed", role)
        claim = claims[axis]
        if axis not in degrees:
            raise TopologyError(axis, "unknown", str(claim), role)
        degree = degrees[axis]
        if type(degree) is not int or not claim.admits(degree):
            raise TopologyError(axis, degree if isinstance(degree, int) else repr(degree), str(claim), role)
    if "SP" in degrees and "TP" in degrees and degrees["SP"] not in (1, degrees["TP"]):
        admitted = f"1 or the TP degree {degrees['TP']}"
        raise TopologyError("SP", degrees["SP"], admitted, role)
