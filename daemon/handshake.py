# SPDX-License-Identifier: Apache-2.0
"""Decides whether a process may join a run, and may stay: same model, same numerical policy, else the fields that differ."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from isoexec.contracts.diff import ABSENT, Difference, disagreements, one_line
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.identities import identities_of
from isoexec.contracts.schema import Contract
from isoexec.contracts.window import FieldDifference
from isoexec.contracts.wire import Attestation, Hello, Welcome

__all__ = ["Agreement", "agree", "agree_still", "contract_of", "refusal"]

# deployment is proven not to change bits: it is shown, never refused
_BINDING = ("semantic", "numerical_policy")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The answer to a hello: differences as (path, theirs, ours), and as fields for the window."""

    accepted: bool
    message: str
    differences: tuple[tuple[str, Any, Any], ...] = ()
    fields: tuple[FieldDifference, ...] = ()


def agree(reference: Hello | None, hello: Hello) -> Agreement:
    """Compare a process with the one that its run was declared by (None: it is the first).

    A driver computes no logprob and is not compared. The identities that a process names are not believed:
    they are made again from its contract.
    """
    own = _own_contract(hello)
    if not own.accepted or reference is None or "driver" in (hello.role, reference.role):
        return own
    differences = disagreements(hello.contract, reference.contract)
    if hello.regime != reference.regime:
        differences.append(
            Difference(path="regime", a=hello.regime, b=reference.regime, identity="numerical_policy")
        )
    if not differences:
        return Agreement(accepted=True, message="")
    found = [(one.path, _value(one.a), _value(one.b)) for one in differences]
    mine, theirs = (one.role if hello.role != reference.role else one.source for one in (hello, reference))
    return Agreement(
        accepted=False,
        message=(
            f"{hello.role} {hello.source} holds another contract than {reference.role} {reference.source}: "
            f"{one_line(differences, mine, theirs)}"
        ),
        differences=tuple(found),
        fields=_fields(found, reference, hello),
    )


def agree_still(hello: Hello, attestation: Attestation) -> tuple[FieldDifference, ...]:
    """Compare what a process attests now with what it said at hello; the fields that differ, engine's the attested.

    An attestation that names no identities where hello had a contract says that its contract could not be read, which
    is a difference too. Where no contract is sent, or one that is not what its identities name, identities differ.
    """
    place = f" ({hello.source}, attested / at hello)"
    said = identities_of(hello.contract).to_dict() if hello.contract is not None else {}
    named, sent = attestation.identities or {}, attestation.contract
    try:
        made = identities_of(sent).to_dict() if sent is not None else said
        if all(named.get(name) == made.get(name) for name in _BINDING):
            return tuple(
                FieldDifference(path=one.path + place, engine=_value(one.a), trainer=_value(one.b))
                for one in disagreements(sent if sent is not None else hello.contract, hello.contract)
            )
    except IsoExecError:
        made = {}  # what has no digest is not what anything names
    return tuple(
        FieldDifference(
            path=f"identities.{name}{place}",
            engine=named.get(name),
            trainer=said.get(name) if named.get(name) != said.get(name) else made.get(name),
        )
        for name in _BINDING
        if named.get(name) != made.get(name)
    )


def _value(value: object) -> Any:
    return None if value == ABSENT else value


def _own_contract(hello: Hello) -> Agreement:
    if hello.contract is None:
        if hello.monitor_only or hello.role == "driver":
            return Agreement(accepted=True, message="")
        return Agreement(
            accepted=False,
            message="no contract and not monitor_only: set ISOEXEC_CONTRACT, or say that the run only monitors",
        )
    try:
        Contract.from_dict(hello.contract)
        made = identities_of(hello.contract).to_dict()
    except IsoExecError as error:
        return Agreement(accepted=False, message=f"the contract cannot be read: {error}")
    named = hello.identities or {}
    wrong = [
        (f"identities.{name}", named[name], made[name])
        for name in _BINDING
        if named.get(name, made[name]) != made[name]
    ]
    if wrong:
        return Agreement(
            accepted=False,
            message=f"{wrong[0][0]} is not the digest of the contract sent; do both sides run one version?",
            differences=tuple(wrong),
            fields=tuple(
                FieldDifference(path=f"{path} ({hello.source})", engine=theirs, trainer=ours)
                for path, theirs, ours in wrong
            ),
        )
    return Agreement(accepted=True, message="")


def _fields(found: list[tuple[str, Any, Any]], reference: Hello, hello: Hello) -> tuple[FieldDifference, ...]:
    rows: list[FieldDifference] = []
    # where both are of one role, the place says whose value stands where
    place = f" ({hello.source} / {reference.source})" if hello.role == reference.role else ""
    for path, theirs, ours in found:
        engine, trainer = (theirs, ours) if hello.role == "engine" else (ours, theirs)
        rows.append(FieldDifference(path=path + place, engine=engine, trainer=trainer))
    return tuple(rows)


def contract_of(hello: Hello) -> Contract | None:
    """Give the contract that a process holds, None where it only monitors."""
    return Contract.from_dict(hello.contract) if hello.contract is not None else None


def refusal(hello: Hello, message: str, differences: tuple[tuple[str, Any, Any], ...] = ()) -> Welcome:
    """Answer a hello with no, and why."""
    return Welcome(
        run=hello.run,
        role="daemon",
        source=f"daemon:{os.getpid()}",
        time=time.time(),
        accepted=False,
        differences=differences,
        message=message,
    )
