# SPDX-License-Identifier: Apache-2.0
"""The commands `isoexec contract list | show | for`: the shipped contracts, what one promises, and the one a model runs under."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from isoexec.contracts.evidence import default_store
from isoexec.contracts.models import read_config
from isoexec.contracts.models.resolve import (
    RegionState,
    Resolution,
    region_states,
    resolve,
    shipped_contracts,
)
from isoexec.contracts.schema import Contract

__all__ = ["find", "listing", "show"]

_REASONS, _WIDTH = 3, 110


def listing(how: str) -> int:
    """Print the shipped contracts with family, arch and how many of their regions are proven; `how` is text or json."""
    store, now = default_store(), time.time()
    rows: list[dict[str, object]] = []
    for path, contract in shipped_contracts():
        states = region_states(contract, store, now=now)
        rows.append(
            {
                "name": contract.name,
                "family": contract.model.family,
                "arch": contract.arch,
                "proven": sum(state.proven for state in states),
                "regions": len(states),
                "architectures": sorted(contract.model.architectures),
                "path": str(path),
            }
        )
    if how == "json":
        _json(rows)
        return 0
    print(f"{'contract':<22} {'family':<15} {'arch':<6} proven  architectures")
    for row in rows:
        names = ", ".join(map(str, row["architectures"])) if isinstance(row["architectures"], list) else ""
        share = f"{row['proven']}/{row['regions']}"
        print(f"{row['name']:<22} {row['family']:<15} {row['arch']:<6} {share:<7} {names}")
    return 0


def show(contract: Contract, how: str) -> int:
    """Print what a contract promises, and last what of it is unproven; `how` is text or json."""
    states = region_states(contract, default_store(), now=time.time())
    open_ones = [state for state in states if not state.proven]
    if how == "json":
        _json(
            {
                "contract": contract.to_dict(),
                "identities": contract.identities.to_dict(),
                "proven": len(states) - len(open_ones),
                "regions": [state.to_dict() for state in states],
            }
        )
        return 0
    print(f"{contract.name}  ({contract.model.family}, arch {contract.arch})")
    _identities(contract)
    print("\nmodel")
    print(f"  {'architectures':<18} {', '.join(sorted(contract.model.architectures))}")
    for name, constraint in sorted(contract.model.facts.items()):
        print(f"  {name:<18} {constraint}")
    print("\nregions")
    for state in states:
        held = [one for one in contract.composition if one.region == state.region]
        cases = {case for one in held for case in one.cases}
        every = {case.name for case in contract.cases} == cases
        print(
            f"  {state.region:<18} {state.function:<30} {'every case' if every else ', '.join(sorted(cases))}"
            f"{_constants(state)}"
        )
        print(f"  {'':<18} owns {', '.join(state.ops)}")
    print("\nproviders")
    for provider in sorted(contract.providers, key=lambda one: (one.function, one.name)):
        what = provider.source if provider.kind == "kernel" else provider.version
        roles = "+".join(sorted(provider.roles))
        print(f"  {provider.function:<22} {provider.name}  {what}  {roles}, {provider.discharge.kind}")
    _claims(contract)
    _unproven(states)
    return 0


def find(model: str, runtime: str, *, arch: str | None, contract: Path | None, how: str) -> int:
    """Print the contract a model runs under, and what keeps it from running; return 0 where it may run, else 1.

    `contract` is a file to look in instead of the shipped contracts, `how` is text or json.
    """
    own = None if contract is None else [(contract, Contract.load(contract))]
    config = read_config(model)
    found = resolve(config, runtime, arch=arch, contracts=own)
    usable = any(one.usable for one in found)
    if how == "json":
        _json({"usable": usable, "resolutions": [one.to_dict() for one in found]})
        return 0 if usable else 1
    print(f"{config.path}: {', '.join(config.architectures)}, {runtime}")
    for one in found:
        print()
        _resolution(one)
    return 0 if usable else 1


def _resolution(one: Resolution) -> None:
    contract = one.contract
    print(f"{contract.name}  ({contract.model.family}, arch {contract.arch})")
    print(f"  {'path':<18} {one.path}")
    _identities(contract)
    role = one.runtime.role
    proven = [state for state in one.regions if state.proven]
    print(f"\n  binds as {role} ({len(proven)} of {len(one.regions)} regions proven)")
    for state in one.regions:
        provider = ", ".join(state.providers) or "nothing"
        mark = "" if state.proven else f"  unproven: {state.kind}"
        print(f"    {state.region:<18} {state.function:<30} by {provider}{mark}")
    if one.refused:
        print(f"\n  refused ({len(one.refused)})")
        for refusal in one.refused:
            print(f"    {refusal}")
    _unproven(one.regions, indent="  ")
    names = [(fact, one.runtime.name_of(fact)) for fact in sorted(contract.model.facts)]
    print(f"\n  facts, as {one.runtime.name} calls them")
    for fact, name in names:
        if fact in one.facts:
            print(f"    {fact:<18} {one.facts[fact]!s:<12} {name}")
    for note in one.runtime.notes:
        print(f"  note: {note}")
    print(f"\n  {'usable' if one.usable else 'not usable'}")


def _unproven(states: Sequence[RegionState], indent: str = "") -> None:
    open_ones = [state for state in states if not state.proven]
    print(f"\n{indent}unproven: {len(open_ones)} of {len(states)} regions")
    for state in open_ones:
        print(f"{indent}  {state.region:<18} {state.function:<30} {state.kind}")
        reasons = list(dict.fromkeys(state.reasons))
        for reason in reasons[:_REASONS]:
            print(f"{indent}  {'':<18} {textwrap.shorten(reason, _WIDTH, placeholder=' ...')}")
        if len(reasons) > _REASONS:
            print(f"{indent}  {'':<18} and {len(reasons) - _REASONS} more: --format json")


def _identities(contract: Contract) -> None:
    for name, digest in contract.identities.to_dict().items():
        print(f"  {name:<18} {digest}")


def _constants(state: RegionState) -> str:
    words = ", ".join(f"{name} {value}" for name, value in sorted(state.constants.items()))
    return f"; {words}" if words else ""


def _claims(contract: Contract) -> None:
    print("\nclaims")
    for role, axes in sorted(contract.claims.topology.items()):
        for axis, claim in axes.items():
            print(f"  {role:<8} {axis:<4} {claim}")
    for kept in contract.claims.state:
        print(f"  {kept.state} is stale after {', '.join(sorted(kept.invalidated_by))}")
    for group in contract.claims.bitwise:
        print(f"  bitwise: {', '.join(sorted(group))}")
    for one in contract.claims.tolerances:
        regions = ", ".join(sorted(one.regions))
        print(
            f"  {' / '.join(sorted(one.cases))}: {one.metric} at most {one.bound} nats, blamed on {regions}"
        )


def _json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2, sort_keys=True, ensure_ascii=False)
    print()
