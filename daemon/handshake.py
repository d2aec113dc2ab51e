# SPDX-License-Identifier: Apache-2.0
"""Decides whether a process may join a run: same model, same numerical policy, else the fields that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isoexec.contracts.diff import diff_dicts
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.identities import identities_of
from isoexec.contracts.schema import Contract
from isoexec.contracts.window import FieldDifference
from isoexec.contracts.wire import Hello

__all__ = ["Agreement", "agree"]

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
    if hello.contract is None or reference.contract is None:
        return _one_sided(reference, hello)
    mine, theirs = identities_of(reference.contract), identities_of(hello.contract)
    found: list[tuple[str, Any, Any]] = []
    if not mine.agrees_with(theirs):
        found = [
            (one.path, one.a, one.b)
            for one in diff_dicts(hello.contract, reference.contract)
            if one.identity in _BINDING
        ]
    if hello.regime != reference.regime:
        found.append(("regime", hello.regime, reference.regime))
    if not found:
        return Agreement(accepted=True, message="")
    return Agreement(
        accepted=False,
        message=(
            f"{hello.role} {hello.source} holds another contract than {reference.role} {reference.source}: "
            f"{len(found)} fields differ, first {found[0][0]}"
        ),
        differences=tuple(found),
        fields=_fields(found, reference, hello),
    )


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


def _one_sided(reference: Hello, hello: Hello) -> Agreement:
    if hello.contract is None and reference.contract is None:
        return Agreement(accepted=True, message="")
    found = [("contract", _name(hello.contract), _name(reference.contract))]
    return Agreement(
        accepted=False,
        message=f"{reference.role} and {hello.role} disagree on whether the run has a contract; give both the same",
        differences=tuple(found),
        fields=_fields(found, reference, hello),
    )


def _name(contract: Mapping[str, Any] | None) -> str | None:
    return None if contract is None else identities_of(contract).numerical_policy


def _fields(found: list[tuple[str, Any, Any]], reference: Hello, hello: Hello) -> tuple[FieldDifference, ...]:
    rows: list[FieldDifference] = []
    # where both are of one role, the place says whose value stands where
    place = f" ({hello.source} / {reference.source})" if hello.role == reference.role else ""
    for path, theirs, ours in found:
        engine, trainer = (theirs, ours) if hello.role == "engine" else (ours, theirs)
        rows.append(FieldDifference(path=path + place, engine=engine, trainer=trainer))
    return tuple(rows)
