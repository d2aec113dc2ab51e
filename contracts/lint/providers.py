# SPDX-License-Identifier: Apache-2.0
"""Lint rules on the providers: that there is one for each role, that it is used, and that its bits are pinned."""

from __future__ import annotations

from collections.abc import Iterator

from isoexec.contracts.digests import ZERO
from isoexec.contracts.lint import Found, rule
from isoexec.contracts.lint.tables import CARRIED_BY, entry, provider_entry, roles_of
from isoexec.contracts.parts import ROLES
from isoexec.contracts.schema import Contract


@rule("IX005")
def functions_have_providers(contract: Contract) -> Iterator[Found]:
    """Every bound function has a provider for every role whose cases bind it.

    Without an admitted provider there is nothing the adapter could install, and it must refuse the region.

    Breach: the engine's cases bind rope.neox_fp32/1, whose only provider has roles: [trainer].

    Fix: admit a provider for the role, or bind a function that has one.
    """
    for binding in contract.composition:
        for role in sorted(roles_of(contract, binding)):
            serving = [p for p in contract.providers if p.function == binding.function and role in p.roles]
            if not serving:
                yield (
                    entry(contract, binding),
                    f"no provider of {binding.function} serves the {role}",
                    f"add a provider of {binding.function} with role {role}, or bind another function",
                )


@rule("IX006", "warning")
def providers_are_used(contract: Contract) -> Iterator[Found]:
    """Every provider computes a function that the composition binds.

    An unused provider is often one whose function id or version was misspelt.

    Breach: a provider of rope.gptj/1, which no entry binds.

    Fix: bind the function, mend its name, or drop the provider.
    """
    bound = {binding.function for binding in contract.composition}
    for provider in contract.providers:
        if provider.function not in bound:
            yield (
                provider_entry(provider),
                f"no region binds {provider.function}",
                "bind it, or drop the provider",
            )


@rule("IX009")
def providers_are_discharged(contract: Contract) -> Iterator[Found]:
    """Every provider names the evidence that its bits are the function's.

    Bits that nobody compared are unknown, and unknown is never admitted.

    Breach: a provider with discharge: {kind: none}, or with an all-zero digest that was never filled in.

    Fix: run the provider's gate and write the record's digest (isoexec gate run --pin FILE).
    """
    for provider in contract.providers:
        if provider.discharge.kind != "evidence" or provider.discharge.evidence == ZERO:
            found = "an all-zero digest" if provider.discharge.kind == "evidence" else "no discharge"
            yield (
                f"{provider_entry(provider)}.discharge",
                f"{found}: that its bits are the function's is unknown",
                "run its gate and name the record (isoexec gate run --pin FILE)",
            )


@rule("IX012", "warning")
def sources_are_pinned(contract: Contract) -> Iterator[Found]:
    """Every kernel's source digest is pinned, and its artifact's where it has one.

    The all-zero digest belongs to no source, so every installed kernel would be refused as another one.

    Breach: source: sha256: and 64 zeros.

    Fix: isoexec contract pin FILE --source FUNCTION=sha256:...
    """
    for provider in contract.providers:
        for name, digest in (("source", provider.source), ("artifact", provider.artifact)):
            if digest == ZERO:
                yield (
                    f"{provider_entry(provider)}.{name}",
                    f"{name} is the all-zero digest",
                    f"write the digest of what is installed (isoexec contract pin FILE --source {provider.function}=...)",
                )


@rule("IX013")
def one_provider_a_role(contract: Contract) -> Iterator[Found]:
    """A function has one provider for each role.

    With two, which of them a process installs is chosen by nobody, and the two need not be equally fast or equally proven.

    Breach: an own kernel and a library both provide linear.chain/1 with role engine.

    Fix: give each role to one provider, and keep the others in a contract of their own.
    """
    for function in sorted({binding.function for binding in contract.composition}):
        for role in ROLES:
            serving = [p for p in contract.providers if p.function == function and role in p.roles]
            if len(serving) > 1:
                yield (
                    f"{provider_entry(serving[-1])}.roles",
                    f"{len(serving)} providers of {function} serve the {role}: "
                    + ", ".join(sorted(one.name for one in serving)),
                    f"give the role {role} to one of them",
                )


@rule("IX016", "warning")
def roles_are_used(contract: Contract) -> Iterator[Found]:
    """A provider serves only roles whose cases bind its function.

    A role that never computes the function is a claim nobody can check, and often the wrong role.

    Breach: the provider of grad_norm.exact/1 has roles: [engine, trainer], and only the trainer has gradients.

    Fix: drop the role, or bind the function in the role's cases.
    """
    for provider in contract.providers:
        bindings = [one for one in contract.composition if one.function == provider.function]
        used = {role for one in bindings for role in roles_of(contract, one)}
        for role in sorted(set(provider.roles) - used) if bindings else ():
            yield (
                f"{provider_entry(provider)}.roles",
                f"no case of the {role} binds {provider.function}",
                f"drop the role {role}",
            )


@rule("IX017")
def what_preserves_has_a_reference(contract: Contract) -> Iterator[Found]:
    """An entry of route reference_preserving has a reference in the contract: an own kernel, or a canonical entry.

    The route says that a faster implementation gives the reference's bits. A library alone is a claim without the thing
    it is compared to: no source of the function is pinned, so nobody can compute the bits it should have.

    Breach: linear.chain/1 is bound with route reference_preserving, and its one provider is a library.

    Fix: admit an own kernel of the function for a role, or take route composition_defining.
    """
    for binding in contract.composition:
        if binding.route != "reference_preserving":
            continue
        kernels = [p for p in contract.providers if p.function == binding.function and p.kind == "kernel"]
        canonical = [
            b for b in contract.composition if b.function == binding.function and b.route == "canonical"
        ]
        if not kernels and not canonical:
            yield (
                f"{entry(contract, binding)}.route",
                f"reference_preserving, and no own kernel or canonical entry of {binding.function} is the reference",
                f"admit an own kernel of {binding.function}, or take route composition_defining",
            )


@rule("IX018", "note")
def libraries_have_settings(contract: Contract) -> Iterator[Found]:
    """A library provider says the settings its bits depend on.

    A library's version alone seldom fixes its bits: split-K, reduced-precision sums, the backend and the thread count
    are switched behind it.

    Breach: a provider of kind library without settings.

    Fix: write the settings it was certified under, such as settings: {split_k: false}; where it has none, leave the note.
    """
    for provider in contract.providers:
        if provider.kind == "library" and not provider.settings:
            yield (
                provider_entry(provider),
                "a library without settings",
                "write the settings it was certified under (isoexec provider show)",
            )


@rule("IX019", "warning")
def libraries_have_their_version_claimed(contract: Contract) -> Iterator[Found]:
    """claims.environment.versions names what a library provider is a part of.

    A process reports the versions that the claim names. A library whose version nobody reports can be another build at
    the next start.

    Breach: a provider torch.linear of kind library, and no entry of claims.environment.versions called torch.

    Fix: add {name: torch} to claims.environment.versions.
    """
    named = {claim.name.lower() for claim in contract.claims.environment.versions}
    for provider in contract.providers:
        whole = provider.name.lower()
        part = whole.partition(".")[0]
        carrier = CARRIED_BY.get(part, provider.name.partition(".")[0])
        if provider.kind == "library" and not {whole, part, carrier.lower()} & named:
            yield (
                provider_entry(provider),
                f"claims.environment.versions does not name {carrier}",
                f"add {{name: {carrier}}} to claims.environment.versions",
            )


@rule("IX039")
def certified_records_can_be_signed(contract: Contract) -> Iterator[Found]:
    """A contract that demands signers does not certify while installing.

    A record made while a process installs is signed by nobody who was asked for, so the demand would be met by nothing
    and refused at every start.

    Breach: claims.evidence with signers and certify: install.

    Fix: certify: refuse, with records signed before; or no signers.
    """
    policy = contract.claims.evidence
    if policy.signers and policy.certify == "install":
        yield (
            "claims.evidence.certify",
            "install, and signers are demanded: what is made while installing is unsigned",
            "write certify: refuse, or demand no signers",
        )
