# SPDX-License-Identifier: Apache-2.0
"""Judges whether the evidence a contract names discharges it, and, in a process, whether it speaks of that process.

`refusals` is what the linter, `isoexec gate verify` and the adapters share: one list of everything that does not hold, each with
the field it is about. Nothing here is a matter of degree: what is missing or unknown is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from isoexec.contracts.canonical import encode
from isoexec.contracts.composites import apart
from isoexec.contracts.digests import ZERO
from isoexec.contracts.errors import EvidenceError
from isoexec.contracts.evidence import Check, EvidenceRecord, Store, Subject, moment
from isoexec.contracts.operators import axes_of, dtypes_of, keeps_state
from isoexec.contracts.parts import Binding, Discharge, Provider, Value
from isoexec.contracts.schema import Contract
from isoexec.contracts.signing import signers

__all__ = ["Live", "Refusal", "families_for", "refusals", "unproven"]

_DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One thing that does not hold.

    `rule` is the lint rule's id, `path` the contract's field, `regions` those that depend on it, and `name` what in the record or
    the process is meant (`evidence`, `expires`, `provider.source`, `environment.torch`, ...).
    """

    rule: str
    path: str
    regions: tuple[str, ...]
    name: str
    wanted: str
    found: str
    fix: str
    severity: str = "error"

    def __str__(self) -> str:
        return f"{self.rule} {self.path}: {self.name}: wanted {self.wanted}, found {self.found}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Live:
    """A process as it is: its `arch`, the source digest of each function's own kernel, and its `environment` by name."""

    arch: str
    sources: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def families_for(contract: Contract, binding: Binding) -> tuple[str, ...]:
    """Return the families of checks a binding needs to be believed, in the order of `FAMILIES`.

    An operator of the training step (`model.step_ops`) has no rows and no cases to agree; it must not depend on how the
    parameters are cut.
    """
    wanted = ["degenerate_shapes", "rerun_determinism"]
    cases = [case for case in contract.cases if case.name in binding.cases]
    if not set(binding.ops) <= set(contract.model.step_ops):
        wanted.append("batch_invariance")
        if len(cases) > 1:
            wanted.append("case_parity")
        if any(case.grad != "no_grad" for case in cases):
            wanted.append("backward")
    if any(keeps_state(op) for op in binding.ops) and any(case.state != "stateless" for case in cases):
        wanted.append("resume_exactness")
    if degrees_for(contract, binding):
        wanted.append("partition_invariance")
    return tuple(sorted(wanted))


def degrees_for(contract: Contract, binding: Binding) -> dict[str, tuple[int, ...]]:
    """Return the claimed degrees of each axis that cuts the binding's sums and is claimed beyond one degree."""
    roles = {case.role for case in contract.cases if case.name in binding.cases}
    out: dict[str, set[int]] = {}
    for role in roles:
        for axis, claim in contract.claims.topology.get(role, {}).items():
            if any(axis in axes_of(op) for op in binding.ops) and claim.domain != (1,):
                out.setdefault(axis, set()).update(claim.domain)
    return {axis: tuple(sorted(degrees)) for axis, degrees in sorted(out.items())}


def unproven(contract: Contract, store: Store, *, now: float) -> dict[str, list[Refusal]]:
    """Return the regions that may not be installed, each with why; empty for a contract that is wholly proven."""
    out: dict[str, list[Refusal]] = {}
    for refusal in refusals(contract, store, now=now):
        if refusal.severity == "error":
            for region in refusal.regions:
                out.setdefault(region, []).append(refusal)
    return dict(sorted(out.items()))


def refusals(contract: Contract, store: Store, *, now: float, live: Live | None = None) -> list[Refusal]:
    """Return everything that keeps the contract from being discharged, by path and then by rule.

    `now` is Unix time in seconds. With `live` the records must also be of the process's sources and environment.
    """
    judge = _Judge(contract, store, now, live)
    found = [*judge.providers(), *judge.bindings()]
    return sorted(found, key=lambda one: (one.path, one.rule, one.name))


class _Judge:
    def __init__(self, contract: Contract, store: Store, now: float, live: Live | None) -> None:
        self.contract, self.store, self.now, self.live = contract, store, now, live
        self._read: dict[str, EvidenceRecord | EvidenceError] = {}

    # -- providers: its bits are the function's ------------------------------------------------------------------------

    def providers(self) -> Iterator[Refusal]:
        for provider in self.contract.providers:
            bindings = [b for b in self.contract.composition if b.function == provider.function]
            regions = tuple(sorted({b.region for b in bindings}))
            path = f"providers[{provider.function}|{provider.name}]"
            at = _At(path, regions)
            record, found = self._record(provider.discharge, at, "IX009", (provider,))
            yield from found
            if record is None:
                continue
            yield from self._identity(record, provider, at)
            yield from self._validity(record, at)
            for binding in _distinct(bindings):
                yield from self._check(record, "conformance", binding, at)

    def _identity(self, record: EvidenceRecord, provider: Provider, at: _At) -> Iterator[Refusal]:
        subject = record.provider
        pairs: list[tuple[str, object, object]] = [
            ("function", provider.function, record.function),
            ("provider.name", provider.name, subject.name),
            ("provider.kind", provider.kind, subject.kind),
            ("provider.source", provider.source, subject.source),
            ("provider.version", provider.version, subject.version),
            ("provider.settings", dict(provider.settings), dict(subject.settings)),
        ]
        for name, wanted, found in pairs:
            if wanted != found:
                yield at.refuse(
                    "IX041", name, wanted, found, "run the gate of this provider, or name its record"
                )
        if self.live is not None and provider.kind == "kernel":
            installed = self.live.sources.get(provider.function)
            if installed != subject.source:
                yield at.refuse(
                    "IX041",
                    "provider.source",
                    f"{installed or 'no such kernel'}, which is installed here",
                    subject.source,
                    "use the release the evidence is of, or run the gates of this source (isoexec gate run)",
                )

    # -- bindings: all its cases have the same bits ------------------------------------------------------------------------

    def bindings(self) -> Iterator[Refusal]:
        for binding in self.contract.composition:
            at = _At(f"composition[{binding.region}]", (binding.region,))
            admitted = tuple(p for p in self.contract.providers if p.function == binding.function)
            record, found = self._record(binding.discharge, at, "IX011", admitted)
            yield from found
            if record is None:
                continue
            ours = [provider for provider in admitted if _same(record, provider)]
            if record.function != binding.function or not ours:
                names = " or ".join(sorted(_named(p) for p in admitted)) or "no provider"
                yield at.refuse(
                    "IX041",
                    "provider",
                    f"{binding.function} by {names}",
                    f"{record.function} by {_named(record.provider)}",
                    "name the record of an admitted provider, or run its gate",
                )
                continue
            yield from self._validity(record, at)
            for family in families_for(self.contract, binding):
                yield from self._check(record, family, binding, at)

    def _check(self, record: EvidenceRecord, family: str, binding: Binding, at: _At) -> Iterator[Refusal]:
        check = record.check(family, binding.constants)
        if check is None:
            constants = (
                ", ".join(f"{name} {value}" for name, value in sorted(binding.constants.items()))
                or "no constants"
            )
            held = ", ".join(sorted({one.family for one in record.checks}))
            yield at.refuse(
                "IX044",
                f"checks.{family}",
                f"a check with {constants}",
                held,
                "run the gate with these constants",
            )
            return
        for failure in check.failures():
            yield at.refuse(
                "IX047",
                f"checks.{family}",
                "a check that holds",
                failure,
                "mend the kernel or the gate, and run it again",
            )
        yield from self._covers(check, family, binding, at)

    def _covers(self, check: Check, family: str, binding: Binding, at: _At) -> Iterator[Refusal]:
        claimed = self.contract.claims.dtypes
        # of a composite its first part alone has operands from outside: what the others take, the parts before them have made
        first = apart(binding)[0]
        dtypes = {dtype for op in first.ops for dtype in dtypes_of(op, claimed)}
        wanted: dict[str, tuple[Value, ...]] = {"dtype": tuple(sorted(dtypes))}
        if family == "case_parity":
            wanted["case"] = binding.cases
        rules = dict.fromkeys(wanted, "IX046")
        if family == "partition_invariance":
            degrees = degrees_for(self.contract, binding)
            wanted |= degrees
            rules |= dict.fromkeys(degrees, "IX045")
        for name, values in wanted.items():
            held = check.domain.get(name, ())
            missing = [str(value) for value in values if value not in held]
            if missing:
                yield at.refuse(
                    rules[name], f"checks.{family}.domain.{name}", f"{', '.join(missing)} covered",
                    ", ".join(map(str, held)) or "nothing", "run the gate over the whole domain, or claim less",
                )  # fmt: skip

    # -- what holds of any record --------------------------------------------------------------------------------------

    def _record(
        self, discharge: Discharge, at: _At, none: str, providers: Iterable[Provider]
    ) -> tuple[EvidenceRecord | None, list[Refusal]]:
        digest = discharge.evidence
        if discharge.kind != "evidence" or digest is None or digest == ZERO:
            fix = "run its gate (isoexec gate run --pin FILE), or leave the region out"
            return None, [at.refuse(none, "discharge", "evidence", f"kind {discharge.kind}", fix)]
        if digest not in self._read:
            try:
                self._read[digest] = self.store.read(digest)
            except EvidenceError as error:
                self._read[digest] = error
        held = self._read[digest]
        if isinstance(held, EvidenceError):
            return None, [at.refuse("IX040", f"discharge.{held.field}", held.wanted, held.found, held.fix)]
        if self._other_builds(held):
            return self._made_here(providers) or held, []
        return held, []

    def _made_here(self, providers: Iterable[Provider]) -> EvidenceRecord | None:
        """Return a record of this build in the place of the one named, where the contract lets machines certify themselves.

        Only the build may be another: a record that is gone or edited is refused whatever was made here.
        """
        if self.live is None or self.contract.claims.evidence.certify != "install":
            return None
        for provider in providers:
            found = self.store.find(
                function=provider.function, provider=provider.name, arch=self.contract.arch
            )
            for record in found:
                if (
                    _same(record, provider)
                    and not self._other_builds(record)
                    and moment(record.expires) > self.now
                ):
                    return record
        return None

    def _other_builds(self, record: EvidenceRecord) -> list[str]:
        """Return the components that run here in another version than the record's, of those the contract claims."""
        if self.live is None:
            return []
        names = [claim.name for claim in self.contract.claims.environment.versions]
        return [
            name
            for name in names
            if name in record.environment and record.environment[name] != self.live.environment.get(name)
        ]

    def _validity(self, record: EvidenceRecord, at: _At) -> Iterator[Refusal]:
        again = "run the gate again (isoexec gate run)"
        if record.arch != self.contract.arch:
            yield at.refuse("IX042", "arch", self.contract.arch, record.arch, "run the gate on this arch")
        if self.live is not None and self.live.arch != record.arch:
            yield at.refuse(
                "IX042", "arch", f"{self.live.arch}, this machine's", record.arch, "run the gate on this arch"
            )
        policy = self.contract.claims.evidence
        if moment(record.expires) <= self.now:
            yield at.refuse("IX043", "expires", "a time to come", record.expires, again)
        if moment(record.made) > self.now + _DAY:  # a day, for clocks and time zones
            yield at.refuse(
                "IX043", "made", "a time gone by", record.made, "set the clock right, or " + again
            )
        if policy.max_age_days is not None and self.now - moment(record.made) > policy.max_age_days * _DAY:
            yield at.refuse("IX043", "made", f"at most {policy.max_age_days} days ago", record.made, again)
        if record.profile != "full":
            yield at.refuse(
                "IX048", "profile", "full", record.profile, "run the gate without --quick", severity="warning"
            )
        yield from self._environment(record, at)
        if policy.signers:
            yield from self._signed(record.digest, policy.signers, at)

    def _environment(self, record: EvidenceRecord, at: _At) -> Iterator[Refusal]:
        for claim in self.contract.claims.environment.versions:
            held = record.environment.get(claim.name)
            if held is None:
                continue  # a component the gate did not run under; what it computes is not this record's to say
            if claim.admitted and held not in claim.admitted:
                yield at.refuse(
                    "IX041",
                    f"environment.{claim.name}",
                    " or ".join(claim.admitted),
                    held,
                    "run the gate under it",
                )
            if self.live is not None and claim.name in self._other_builds(record):
                here = self.live.environment.get(claim.name, "unknown")
                yield at.refuse(
                    "IX050",
                    f"environment.{claim.name}",
                    f"{here}, which runs here",
                    held,
                    "run the gate here, or install what the evidence is of",
                )

    def _signed(self, digest: str, wanted: Iterable[str], at: _At) -> Iterator[Refusal]:
        words = "a signature of " + " or ".join(f"{key[:16]}..." for key in wanted)
        try:
            found = signers(self.store, digest)
        except EvidenceError as error:
            yield at.refuse("IX049", error.field, words, error.found, error.fix)
            return
        if not found & set(wanted):
            held = ", ".join(f"{key[:16]}..." for key in sorted(found)) or "none"
            yield at.refuse("IX049", "signature", words, held, "sign the record (isoexec gate sign)")


@dataclass(frozen=True)
class _At:
    path: str
    regions: tuple[str, ...]

    def refuse(
        self, rule: str, name: str, wanted: object, found: object, fix: str, severity: str = "error"
    ) -> Refusal:
        return Refusal(
            rule=rule,
            path=self.path,
            regions=self.regions,
            name=name,
            wanted=str(wanted),
            found="nothing" if found is None else str(found),
            fix=fix,
            severity=severity,
        )


def _distinct(bindings: Iterable[Binding]) -> Iterator[Binding]:
    """Yield one binding a set of constants."""
    seen: set[bytes] = set()
    for binding in bindings:
        name = encode(dict(binding.constants))
        if name not in seen:
            seen.add(name)
            yield binding


def _named(provider: Provider | Subject) -> str:
    return f"{provider.name} ({provider.source or provider.version})"


def _same(record: EvidenceRecord, provider: Provider) -> bool:
    subject = record.provider
    return (subject.name, subject.source, subject.version) == (
        provider.name,
        provider.source,
        provider.version,
    )
