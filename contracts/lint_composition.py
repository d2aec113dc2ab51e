# SPDX-License-Identifier: Apache-2.0
"""Lint rules IX001 to IX012: who owns which operator, who computes it, and why that is believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from isoexec.contracts.digests import ZERO
from isoexec.contracts.lint import Found, rule
from isoexec.contracts.parts import Binding, Discharge, Provider
from isoexec.contracts.schema import Contract


def _entry(binding: Binding) -> str:
    return f"composition[{binding.region}]"


def _provider(provider: Provider) -> str:
    return f"providers[{provider.function}|{provider.name}]"


def _required(contract: Contract, case: str) -> list[str]:
    """Operators a case must own: the model's, and the step's where it has gradients."""
    grad = contract.case(case).grad
    return [*contract.model.ops, *(contract.model.step_ops if grad != "no_grad" else ())]


def _owners(contract: Contract, case: str) -> Counter[str]:
    return Counter(op for binding in contract.composition if case in binding.cases for op in binding.ops)


@rule("IX001")
def every_op_is_owned(contract: Contract) -> Iterator[Found]:
    """In every case every operator of the model is owned by a region.

    An operator nobody owns runs whatever kernel the runtime happens to choose, and its bits are nobody's promise.
    """
    for case in contract.cases:
        owners = _owners(contract, case.name)
        for op in _required(contract, case.name):
            if not owners[op]:
                yield (
                    f"cases[{case.name}]",
                    f"operator {op} is owned by no region",
                    f"add {op} to the ops of a composition entry that holds for {case.name}",
                )


@rule("IX002")
def no_op_is_owned_twice(contract: Contract) -> Iterator[Found]:
    """In no case is an operator owned by two composition entries.

    Two owners mean two schedules for one value; which of them ran would be an accident of installation order.
    """
    for case in contract.cases:
        for op, count in _owners(contract, case.name).items():
            if count > 1:
                regions = sorted(
                    b.region for b in contract.composition if case.name in b.cases and op in b.ops
                )
                yield (
                    f"cases[{case.name}]",
                    f"operator {op} is owned {count} times, by {', '.join(regions)}",
                    "let one entry own it",
                )


@rule("IX003")
def regions_are_known(contract: Contract) -> Iterator[Found]:
    """A tolerance is blamed on regions that the composition has.

    Blame on a region that does not exist can never be checked, so the tolerance would excuse anything.
    """
    for tolerance in contract.claims.tolerances:
        for region in tolerance.regions:
            if region not in contract.regions:
                yield (
                    f"claims.tolerances[{'+'.join(sorted(tolerance.cases))}].regions",
                    f"unknown region {region}",
                    f"use one of {', '.join(contract.regions)}",
                )


@rule("IX004")
def cases_are_known(contract: Contract) -> Iterator[Found]:
    """Every case named anywhere is one of `cases`.

    A misspelt case silently takes an entry, a tolerance or a bitwise claim away from the case it was meant for.
    """
    known = {case.name for case in contract.cases}
    named = [(_entry(binding), binding.cases) for binding in contract.composition]
    named += [("claims.bitwise", group) for group in contract.claims.bitwise]
    named += [("claims.tolerances", tolerance.cases) for tolerance in contract.claims.tolerances]
    for path, cases in named:
        for case in cases:
            if case not in known:
                yield path, f"unknown case {case}", f"use one of {', '.join(sorted(known))}, or add the case"


@rule("IX005")
def functions_have_providers(contract: Contract) -> Iterator[Found]:
    """Every bound function has a provider for every role whose cases bind it.

    Without an admitted provider there is nothing the adapter could install, and it must refuse the region.
    """
    for binding in contract.composition:
        roles = {case.role for case in contract.cases if case.name in binding.cases}
        for role in sorted(roles):
            serving = [p for p in contract.providers if p.function == binding.function and role in p.roles]
            if not serving:
                yield (
                    _entry(binding),
                    f"no provider of {binding.function} serves the {role}",
                    f"add a provider of {binding.function} with role {role}, or bind another function",
                )


@rule("IX006", "warning")
def providers_are_used(contract: Contract) -> Iterator[Found]:
    """Every provider computes a function that the composition binds.

    An unused provider is often one whose function id or version was misspelt.
    """
    bound = {binding.function for binding in contract.composition}
    for provider in contract.providers:
        if provider.function not in bound:
            yield _provider(provider), f"no region binds {provider.function}", "bind it, or drop the provider"


@rule("IX007")
def ops_are_known(contract: Contract) -> Iterator[Found]:
    """A region owns only operators that the model has in those cases.

    An operator outside the model is not computed in the case, so nothing could be installed or checked for it.
    """
    known = {case.name: _required(contract, case.name) for case in contract.cases}
    for binding in contract.composition:
        for op in binding.ops:
            for case in binding.cases:
                if case in known and op not in known[case]:
                    yield (
                        _entry(binding),
                        f"operator {op} is none of the model's in case {case}",
                        "add it to model.ops or model.step_ops, or mend the name",
                    )


@rule("IX008")
def both_sides_bind_one_function(contract: Contract) -> Iterator[Found]:
    """Cases claimed bitwise bind the same function with the same constants for every operator, or prove it equal.

    Engine and trainer that compute different schedules differ in bits, unless evidence shows that they do not.
    """
    for group in contract.claims.bitwise:
        for op in contract.model.ops:
            owners = [b for b in contract.composition if op in b.ops and set(group) & set(b.cases)]
            schedules = {(b.function, tuple(sorted(map(repr, b.constants.items())))) for b in owners}
            unproven = [b for b in owners if b.discharge.kind != "evidence"]
            if len(schedules) > 1 and unproven:
                names = ", ".join(sorted({f"{b.region} ({b.function})" for b in owners}))
                yield (
                    _entry(unproven[0]),
                    f"cases claimed bitwise compute {op} by different functions or constants: {names}",
                    "bind one function with one set of constants, discharge with evidence, or claim a tolerance",
                )


@rule("IX009")
def providers_are_discharged(contract: Contract) -> Iterator[Found]:
    """Every provider has a discharge: evidence, or it is the function's specification.

    Bits that nobody compared are unknown, and unknown is never admitted.
    """
    for provider in contract.providers:
        if provider.discharge.kind == "none":
            yield (
                _provider(provider),
                "no discharge: that its bits are the function's is unknown",
                "run its gates and name the evidence record",
            )
        elif _is_zero(provider.discharge):
            yield _provider(provider), "evidence is the all-zero digest", "name the evidence record"


@rule("IX010")
def reference_is_the_specification(contract: Contract) -> Iterator[Found]:
    """Only an own kernel may be discharged by reference.

    `reference` says that the provider's source is the function's specification. A library's source is never that.
    """
    for provider in contract.providers:
        if provider.discharge.kind == "reference" and (
            provider.kind != "kernel" or provider.artifact is not None
        ):
            what = "a library" if provider.kind != "kernel" else "a compiled artifact"
            yield (
                _provider(provider),
                f"{what} is discharged by reference",
                "discharge it with evidence that its bits are the function's",
            )


@rule("IX011")
def bindings_are_discharged(contract: Contract) -> Iterator[Found]:
    """Every binding is discharged, and one that says it preserves the reference's bits has evidence.

    A fused or reordered schedule keeps the canonical bits only where a gate has shown that it does.
    """
    for binding in contract.composition:
        if binding.route == "reference_preserving" and binding.discharge.kind != "evidence":
            yield (
                _entry(binding),
                f"route reference_preserving with discharge {binding.discharge.kind}",
                "name the evidence record, or take route composition_defining",
            )
        elif binding.discharge.kind == "none":
            yield (
                _entry(binding),
                "no discharge: that its cases give the same bits is unknown",
                "name the evidence record, or say reference where one provider serves all its cases",
            )
        elif _is_zero(binding.discharge):
            yield _entry(binding), "evidence is the all-zero digest", "name the evidence record"


@rule("IX012", "warning")
def sources_are_pinned(contract: Contract) -> Iterator[Found]:
    """Every kernel's source digest is pinned.

    The all-zero digest belongs to no source, so every installed kernel would be refused as another one.
    """
    for provider in contract.providers:
        if provider.source == ZERO:
            yield (
                _provider(provider),
                "source is the all-zero digest",
                f"isoexec contract pin FILE --source {provider.function}=sha256:...",
            )


def _is_zero(discharge: Discharge) -> bool:
    return discharge.kind == "evidence" and discharge.evidence == ZERO
