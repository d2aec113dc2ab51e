# SPDX-License-Identifier: Apache-2.0
"""Lint rules on claims: topology, kept state and environment."""

from __future__ import annotations

from collections.abc import Iterator

from isoexec.contracts.lint import Found, rule
from isoexec.contracts.lint.tables import kept_by, provider_entry
from isoexec.contracts.parts import AXES, ROLES
from isoexec.contracts.schema import Contract


@rule("IX020")
def every_axis_is_claimed(contract: Contract) -> Iterator[Found]:
    """Every role that has cases claims every parallel axis: TP EP ETP SP CP PP DP.

    CP and PP are the ones people forget: a run that splits the context or the layers without a claim would be judged by a
    contract that says nothing about it.

    Breach: claims.topology.trainer has no CP.

    Fix: write CP: {pinned: 1}, or the domain it is proven for.
    """
    for role in ROLES:
        if not contract.cases_of(role):
            continue
        for axis in AXES:
            if axis not in contract.claims.topology.get(role, {}):
                yield (
                    f"claims.topology.{role}.{axis}",
                    f"the {role} claims nothing for {axis}",
                    f"write {axis}: {{pinned: 1}} or the domain it is proven for",
                )


@rule("IX033")
def one_arch(contract: Contract) -> Iterator[Found]:
    """The contract, its environment and its providers are of one arch.

    Bits proven on one arch say nothing about another.

    Breach: arch: cpu, with claims.environment.arch: sm90.

    Fix: write one arch; a second one is a second contract.
    """
    found = contract.claims.environment.arch
    if found != contract.arch:
        yield (
            "claims.environment.arch",
            f"is {found}, the contract's is {contract.arch}",
            f"write {contract.arch}, or change the contract's",
        )
    for provider in contract.providers:
        if provider.arch not in (None, contract.arch):
            yield (
                f"{provider_entry(provider)}.arch",
                f"is {provider.arch}, the contract's is {contract.arch}",
                f"admit a provider proven on {contract.arch}",
            )


@rule("IX034")
def kept_state_is_invalidated(contract: Contract) -> Iterator[Found]:
    """Every state that a case keeps says that a weight sync invalidates it.

    A KV cache or prefix cache read across a weight sync mixes two policies in one logprob.

    Breach: engine_decode has state: paged_kv, and claims.state does not list prefix_cache.

    Fix: add {state: prefix_cache, invalidated_by: [weight_sync]}.
    """
    claims = {claim.state: claim.invalidated_by for claim in contract.claims.state}
    keepers: dict[str, list[str]] = {}
    for case in contract.cases:
        for state in kept_by(contract, case):
            keepers.setdefault(state, []).append(case.name)
    for state, cases in sorted(keepers.items()):
        if "weight_sync" not in claims.get(state, ()):
            yield (
                f"claims.state[{state}]" if state in claims else "claims.state",
                f"{', '.join(sorted(cases))} keeps {state}, and nothing says that weight_sync invalidates it",
                f"add {{state: {state}, invalidated_by: [weight_sync]}}",
            )


@rule("IX062", "note")
def invariance_is_over_several(contract: Contract) -> Iterator[Found]:
    """`invariant` names at least two degrees.

    Invariance over one degree says nothing more than that the degree is pinned, and reads as if it did.

    Breach: TP: {invariant: [2]}.

    Fix: TP: {pinned: 2}, or the degrees that all give the same bits.
    """
    for role, axes in sorted(contract.claims.topology.items()):
        for axis, claim in axes.items():
            if claim.pinned is None and len(claim.domain) == 1:
                yield (
                    f"claims.topology.{role}.{axis}",
                    f"invariant over the one degree {claim.domain[0]}",
                    f"write {axis}: {{pinned: {claim.domain[0]}}}",
                )


@rule("IX063", "warning")
def state_claims_are_of_kept_state(contract: Contract) -> Iterator[Found]:
    """Every state claim is of a state that some case keeps, or of cast_cache.

    A claim of a state nobody keeps protects nothing; most often the name is misspelt, and the state it was meant for has
    no claim.

    Breach: claims.state lists recurrent_state, and no operator of the model keeps one.

    Fix: mend the name (kv_cache, prefix_cache, recurrent_state, conv_state, cast_cache), or drop the claim.
    """
    kept = {state for case in contract.cases for state in kept_by(contract, case)} | {"cast_cache"}
    for claim in contract.claims.state:
        if claim.state not in kept:
            yield (
                f"claims.state[{claim.state}]",
                f"no case keeps {claim.state}",
                f"use one of {', '.join(sorted(kept))}, or drop the claim",
            )


@rule("IX065", "warning")
def versions_are_named(contract: Contract) -> Iterator[Found]:
    """claims.environment.versions names torch: the component every kernel's bits stand on.

    Engine and trainer compare the versions that are named. Two builds of torch may sum in two orders, and nobody would
    be told.

    Breach: claims.environment without versions.

    Fix: versions: [{name: torch}]
    """
    if not any(claim.name == "torch" for claim in contract.claims.environment.versions):
        yield (
            "claims.environment.versions" if contract.claims.environment.versions else "claims.environment",
            "does not name torch",
            "add {name: torch} to versions",
        )


@rule("IX068")
def deployment_changes_no_bit(contract: Contract) -> Iterator[Found]:
    """`deployment` holds nothing that the rest of the contract holds: no constant, parallel axis, switch or version.

    Two processes may differ in deployment and still meet. What changes bits and is written there is hidden from every
    comparison.

    Breach: deployment: {kv_segment: 64}, where attention's constants have kv_segment.

    Fix: say it where it belongs: in constants, claims.topology or claims.environment.
    """
    environment = contract.claims.environment
    named = {name: f"a constant of {b.function}" for b in contract.composition for name in b.constants}
    named |= dict.fromkeys(AXES, "a parallel axis, which claims.topology claims")
    named |= dict.fromkeys(environment.variables, "one of claims.environment.variables")
    named |= dict.fromkeys(environment.switches, "one of claims.environment.switches")
    named |= {claim.name: "one of claims.environment.versions" for claim in environment.versions}
    for name in sorted(set(contract.deployment_section) & set(named)):
        yield f"deployment.{name}", f"is {named[name]}", "drop it here; it may change bits"
